"""The Pareto front against its definition."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.plan import Plan
from pipeplan.planners.auto.planner import _alternatives, _pareto
from pipeplan.planners.auto.proposals import PlannersAsked, Proposal, Proposer, pareto_front
from pipeplan.planners.auto.ranking import Ranked, Ranking
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.reasons import readable
from pipeplan.planners.solve import solve
from tests.pipeplan.builders import Cell, cluster, profile

POINTS = st.lists(st.tuples(st.integers(0, 8).map(float), st.integers(0, 8)), max_size=20)


@given(points=POINTS)
def test_the_front_holds_every_point_that_no_other_beats_once(points: list[tuple[float, int]]) -> None:
    front = pareto_front(points, throughput_samples_per_s=lambda p: p[0], memory_bytes=lambda p: p[1])
    unbeaten = {
        point
        for point in points
        if not any(other[0] >= point[0] and other[1] <= point[1] and other != point for other in points)
    }
    assert set(front) == unbeaten
    assert len(front) == len(unbeaten)
    assert front == sorted(front, key=lambda p: (-p[0], -p[1]))


def test_an_unplayed_plan_whose_closed_form_is_faster_may_be_faster() -> None:
    problem = PlanningProblem(
        profile=profile([Cell(weight_bytes=100, activation_bytes=50)] * 4),
        cluster=cluster((4, 400.0), memory_bytes=10**6),
        batch_size=16,
    )
    two, four = (solve("pipedream-2bw", replace(problem, options=Options(stages=stages))) for stages in (2, 4))
    assert isinstance(two, Plan) and isinstance(four, Plan)
    small, large = sorted((two, four), key=lambda plan: max(rank_bytes(plan)))
    proposer = Proposer("pipedream-2bw")
    best = Ranked(proposal=Proposal(plan=small, proposer=proposer, order=0), samples_per_s=100.0, played=True)
    other = Ranked(proposal=Proposal(plan=large, proposer=proposer, order=1), samples_per_s=110.0, played=False)
    ranking = Ranking(problem=problem, fitting=[best, other])
    more = readable(other.memory_bytes - best.memory_bytes)
    in_front = {each.depth: each.reason for each in _pareto(ranking.fitting)}
    assert in_front[small.depth] == "the answer"
    assert in_front[large.depth] == f"too long to be played; it may be faster, with {more} more on a device"
    (loser,) = _alternatives(PlannersAsked(), ranking)
    assert loser.reason == "too long to be played; about 110 samples/s, it may be faster"
