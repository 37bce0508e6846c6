"""The certificate of a search by play: true ones hold, and one that claims more than is true does not."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeplan.documents.certificate import Certificate
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Overheads
from pipeplan.errors import InvalidInputError
from pipeplan.planners.auto.proposals import Proposal, Proposer
from pipeplan.planners.auto.ranking import Ranked, Ranking
from pipeplan.planners.auto.search import METHOD
from pipeplan.planners.auto.space import PlayedSpace
from pipeplan.planners.complete import play, play_again
from pipeplan.planners.played import searched
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.verify import Finding, verify
from tests.pipeplan.builders import Cell, cells, cluster, clusters, profile
from tests.pipeplan.planners.auto.test_auto import split, transformer
from tests.pipeplan.planners.auto.test_bound import OVERHEADS
from tests.properties import examples

ALTERNATING = 1.05
"""Without a flush a play may pass its bound by so much: a claim that is less wrong may not be found out."""


@st.composite
def problems(draw: st.DrawFn) -> PlanningProblem:
    """A few blocks on a few devices."""
    blocks: Sequence[Cell] = draw(st.lists(cells(), min_size=1, max_size=5))
    machines: Cluster = draw(clusters(6))
    latency_s = draw(st.sampled_from([0.0, 0.01, 0.5]))
    model = replace(profile(blocks), overheads=draw(st.sampled_from([Overheads(), OVERHEADS])))
    return PlanningProblem(
        profile=split(model) if draw(st.booleans()) else model,
        cluster=replace(machines, levels=tuple(replace(level, latency_s=latency_s) for level in machines.levels)),
        batch_size=draw(st.sampled_from([1, 4, 8])),
        options=Options(schedule=draw(st.sampled_from([None, None, "1f1b", "pipedream-2bw"]))),
    )


def answer_to(problem: PlanningProblem) -> Plan:
    """Auto's plan, proven by a search of the space."""
    answer = solve("auto", problem)
    assert isinstance(answer, Plan) and certificate_of(answer).method == METHOD
    return answer


def answer_if_any(problem: PlanningProblem, planner: str = "auto") -> Plan:
    """A planner's, of problems that may have none."""
    try:
        answer = solve(planner, problem)
    except InvalidInputError:
        assume(False)
        raise
    assume(isinstance(answer, Plan) and answer.certificate is not None and answer.certificate.method == METHOD)
    assert isinstance(answer, Plan)
    return answer


def certificate_of(plan: Plan) -> Certificate:
    assert plan.certificate is not None
    return plan.certificate


def optimality(plan: Plan, problem: PlanningProblem) -> Finding:
    (finding,) = (one for one in verify(plan, problem) if one.what == "optimality")
    return finding


def everything(problem: PlanningProblem) -> Iterator[Ranked]:
    """Every plan of the space that fits, played."""
    schedule = problem.options.schedule
    space = PlayedSpace(problem=problem) if schedule is None else PlayedSpace(problem=problem, schedules=(schedule,))
    ranking = Ranking(problem=problem, left=10**9)
    for configuration in space.configurations():
        stops = configuration.split()
        plan = None if stops is None else configuration.plan(stops)
        for variant in ranking.variants(plan) if plan is not None else ():
            ranking.add(Proposal(plan=variant, proposer=Proposer("space"), order=0))
    return iter(ranking.fitting)


@examples(60)
@given(problems(), st.sampled_from(["pipedream", "pipedream-2bw", "gpipe"]))
def test_what_the_others_claim_holds_for_their_own_spaces(problem: PlanningProblem, planner: str) -> None:
    findings = verify(answer_if_any(problem, planner), problem)
    assert all(finding.holds for finding in findings), findings


@examples(40)
@given(problems())
def test_what_auto_claims_holds(problem: PlanningProblem) -> None:
    plan = answer_if_any(problem)
    findings = verify(plan, problem)
    assert all(finding.holds for finding in findings), findings
    most = 1 / certificate_of(plan).bound
    assert all(each.samples_per_s <= most * ALTERNATING for each in everything(problem))


@examples(40)
@given(problems(), st.data())
def test_a_slower_plan_that_calls_itself_the_best_is_found_out(problem: PlanningProblem, data: st.DataObject) -> None:
    plan = answer_if_any(problem)
    played = [each for each in everything(problem) if each.played]
    best = max((each.samples_per_s for each in played), default=0.0)
    slower = [each for each in played if each.samples_per_s * ALTERNATING < best]
    assume(slower)
    other = data.draw(st.sampled_from(slower))
    claimed = replace(certificate_of(plan), value=1 / other.samples_per_s, bound=1 / other.samples_per_s)
    finding = optimality(replace(other.plan, planner="auto", certificate=claimed), problem)
    assert not finding.holds
    assert f"none plays more than {other.samples_per_s:.6g}" in finding.detail


def test_a_split_backward_goes_on_while_gradients_pass_other_stages() -> None:
    """Four blocks without a forward, one microbatch: the last stage's weight gradients were taken to delay the others.

    On three stages the inputs' gradients take 2 s, and the first stage's weight gradient 0.5 s: 0.4 samples/s, which
    auto ruled out by a bound of 1/3.
    """
    blocks = profile([Cell(forward_s=0.0, backward_s=1.0)] * 4)
    problem = PlanningProblem(
        profile=split(blocks), cluster=cluster((3, 1.0)), batch_size=1, options=Options(schedule="1f1b")
    )
    plan = answer_to(problem)
    assert plan.throughput_samples_per_s == pytest.approx(0.4)
    assert all(finding.holds for finding in verify(plan, problem))


def test_the_plans_own_play_bounds_what_it_may_claim() -> None:
    problem = transformer()
    plan = answer_to(problem)
    held = certificate_of(plan)
    assert optimality(plan, problem).holds
    above = optimality(replace(plan, certificate=replace(held, bound=1.01 * held.value)), problem)
    assert not above.holds and "is above what the plan itself plays" in above.detail
    faster = optimality(replace(plan, certificate=replace(held, value=held.value / 2)), problem)
    assert not faster.holds and "the plan plays" in faster.detail
    nothing = optimality(replace(plan, certificate=replace(held, bound=0.0)), problem)
    assert not nothing.holds and "its bound is not above 0" in nothing.detail


def test_a_certificate_that_claims_less_holds_for_less() -> None:
    problem = transformer()
    plan = answer_to(problem)
    held = certificate_of(plan)
    finding = optimality(replace(plan, certificate=replace(held, bound=held.value / 2)), problem)
    assert finding.holds and finding.detail.startswith("within 100 % of the optimum: ") and finding.gap == 1


def test_the_numbers_are_those_of_the_space() -> None:
    problem = transformer()
    detail = optimality(answer_to(problem), problem).detail
    spaces, _ = searched("auto", problem)
    assert f"of {sum(space.considered for space in spaces)} shapes" in detail
    assert "a batch of 16, with no further option" in detail
    asked = replace(problem, options=Options(schedule="1f1b", stages=4))
    assert "with schedule 1f1b, stages 4" in optimality(answer_to(asked), asked).detail


def test_a_plan_of_other_options_is_not_what_was_asked_for() -> None:
    """What is best of four stages is not the best of all."""
    problem = replace(transformer(), cluster=cluster((4, 400.0), (2, 40.0), memory_bytes=10**6))
    asked = replace(problem, options=Options(schedule="gpipe", stages=8))
    plan = answer_to(asked)
    assert optimality(plan, asked).holds
    assert not optimality(plan, problem).holds


@examples(60)
@given(problems(), st.integers(100, 5_000), st.data())
def test_a_play_is_repeated_as_it_was_made(problem: PlanningProblem, limit: int, data: st.DataObject) -> None:
    """Auto plays less of a plan than other planners do: its plans were once found to play otherwise."""
    plans = list(everything(replace(problem, batch_size=24)))
    assume(plans)
    plan = data.draw(st.sampled_from(plans)).plan
    simulated = play(plan, instructions=limit)
    assume(simulated is not None)
    assert play_again(replace(plan, simulated=simulated)) == simulated
