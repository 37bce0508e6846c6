"""Planners of chains, asked about graphs."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeplan.calibration.observed import costs_of
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError
from pipeplan.planners.on_chain import chain_of
from pipeplan.planners.pipedream.states import cut_states
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.planners.verify import verify
from tests.pipeplan.builders import PLENTY, Cell, cluster, profile
from tests.pipeplan.graphs import DIAMOND, Edges, crossing, cuts_by_definition, graph, graphs
from tests.pipeplan.planners.exact.mixed import Gpu, mixed_problem
from tests.pipeplan.planners.on_paper import on_paper
from tests.properties import examples
from tests.schedules import CHUNKED

RESIDUAL: Edges = ((0, 1), (0, 3), (1, 2), (2, 4), (3, 4), (4, 5))
"""
0 -+- 1 - 2 -+- 4 - 5
   +--- 3 ---+
"""
CELLS = [
    Cell(forward_s=place + 1, backward_s=2, weight_bytes=10 * place, output_bytes=4, activation_bytes=3)
    for place in range(6)
]


def problem_of(
    model: Profile, options: Options | None = None, *, devices: int = 2, memory_bytes: int = PLENTY
) -> PlanningProblem:
    machines = cluster((devices, 100.0), memory_bytes=memory_bytes)
    return PlanningProblem(profile=model, cluster=machines, batch_size=4, options=options or Options())


def test_what_lies_between_two_single_tensors_becomes_one_block() -> None:
    chain = chain_of(graph(CELLS, RESIDUAL, sizes=(1, 2), input_bytes=7))
    assert [block.name for block in chain.blocks] == ["block0", "block1..block4", "block5"]
    assert [block.weight_bytes for block in chain.blocks] == [0, 100, 50]
    first, middle, last = (block.at(2) for block in chain.blocks)
    assert (middle.forward_s, middle.backward_s) == (28, 16)
    assert (first.input_bytes, middle.input_bytes, middle.output_bytes, last.input_bytes) == (14, 8, 8, 8)
    assert middle.activation_bytes == 24
    assert chain.edges is None


def test_blocks_of_the_chain_use_the_weights_that_blocks_of_the_graph_use() -> None:
    """Blocks 1 to 4 become one block, which needs no copy of weights of its own."""
    shared = tuple(TiedWeights(block=block, also=also, weight_bytes=9) for block, also in ((1, (3, 5)), (2, (4,))))
    chain = chain_of(replace(graph(CELLS, RESIDUAL), tied=shared))
    assert chain.tied == (TiedWeights(block=1, also=(2,), weight_bytes=9),)


@given(graphs())
@examples(100)
def test_the_chain_of_a_graph_has_the_states_that_one_tensor_crosses(model: Profile) -> None:
    chain, states = cut_states(chain_of(model), 1).states, cut_states(model, 1, cuts="single-tensor").states
    for name in ("compute_s", "weight_bytes", "added_bytes", "kept_before", "boundary_bytes", "input_bytes"):
        assert getattr(chain, name).tolist() == getattr(states, name).tolist()


@pytest.mark.parametrize("planner", ["pipedream-2bw", "gpipe"])
def test_an_answer_for_the_chain_is_put_back_into_the_graphs_blocks(planner: str) -> None:
    model = graph(CELLS, RESIDUAL)
    options = Options(stages=2, microbatch_size=1, cuts="single-tensor")
    plan, on_chain = (
        on_paper(planner, problem_of(model, options)),
        on_paper(planner, problem_of(chain_of(model), replace(options, cuts=None))),
    )
    assert isinstance(plan, Plan) and isinstance(on_chain, Plan)
    places = (0, 1, 5, 6)
    assert [(s.start, s.stop) for s in plan.stages] == [(places[s.start], places[s.stop]) for s in on_chain.stages]
    assert plan.order == (0, 1, 2, 3, 4, 5)
    assert plan.profile_id == content_id(model)
    assert plan.costs == on_chain.costs


def test_pipedream_on_single_tensors_is_pipedream_on_the_chain() -> None:
    model = graph(CELLS, RESIDUAL)
    plan = on_paper("pipedream", problem_of(model, Options(cuts="single-tensor", microbatch_size=1)))
    on_chain = on_paper("pipedream", problem_of(chain_of(model), Options(microbatch_size=1)))
    assert isinstance(plan, Plan) and isinstance(on_chain, Plan)
    assert plan.closed_form.time_per_microbatch_s == on_chain.closed_form.time_per_microbatch_s
    assert plan.costs == on_chain.costs


def test_pipedream_cuts_between_branches_and_pays_for_all_that_crosses() -> None:
    """
    0 (1 s) -+- 1 (5 s) -+- 3 (1 s)
             +- 2 (5 s) -+             {0, 1} and {2, 3} take 6 s each; the outputs of 0 and of 1 cross.
    """
    cells = [
        Cell(forward_s=s, backward_s=0, weight_bytes=10**6, output_bytes=out)
        for s, out in ((1, 3), (5, 4), (5, 9), (1, 0))
    ]
    model = graph(cells, ((0, 1), (0, 2), (1, 3), (2, 3)), input_bytes=2)
    plan = on_paper("pipedream", replace(problem_of(model), batch_size=1))
    assert isinstance(plan, Plan) and plan.order is not None
    assert [sorted(plan.order[s.start : s.stop]) for s in plan.stages] == [[0, 1], [2, 3]]
    first, last = plan.costs
    assert (first.forward_s, last.forward_s) == (6.0, 6.0)
    assert first.activation_transfer_s == last.gradient_transfer_s == 7 / 100.0
    assert (first.input_bytes, last.input_bytes) == (2, 7)
    assert plan.certificate is not None and plan.certificate.gap == 0
    assert plan.simulated is not None


def test_stages_are_named_by_places_in_the_order() -> None:
    """The block from the side that is computed late stands behind others in the order, before them in the profile."""
    #  0 - 2 - 3 and 1 - 3: block 1 goes to the second stage
    cells = [Cell(forward_s=4, backward_s=0, weight_bytes=10**6, output_bytes=1)] * 4
    plan = on_paper("pipedream", replace(problem_of(graph(cells, ((0, 2), (1, 3), (2, 3)))), batch_size=1))
    assert isinstance(plan, Plan) and plan.order is not None
    assert [(s.start, s.stop) for s in plan.stages] == [(0, 2), (2, 4)]
    assert plan.closed_form.time_per_microbatch_s == 8.0


def nested(cuts: list[frozenset[int]], stages: int) -> Iterator[tuple[frozenset[int], ...]]:
    """All sequences of so many cuts more, each of which holds the one before and a block beyond; the last is all."""
    for path in combinations(cuts[1:-1], stages - 1):
        if all(first < last for first, last in pairwise(path)):
            yield (cuts[0], *path, cuts[-1])


def slowest_s(model: Profile, path: tuple[frozenset[int], ...], bandwidth: float) -> float:
    """The slowest stage of 2BW between these cuts: its compute, and the tensors at both ends there and back."""
    blocks = model.at(1)
    moved_s = [2 * crossing(model, cut) / bandwidth for cut in path]
    compute_s = [sum(blocks[block].compute_s for block in last - first) for first, last in pairwise(path)]
    return max(own + before + after for own, (before, after) in zip(compute_s, pairwise(moved_s), strict=True))


@given(graphs(blocks_at_most=6), st.integers(2, 4), st.sampled_from([0.5, 2.0, 16.0]))
@examples(150)
def test_2bws_stages_lose_nothing_against_all_nested_cuts_of_the_graph(
    model: Profile, stages: int, bandwidth: float
) -> None:
    paths = list(nested(cuts_by_definition(model), stages))
    assume(paths)
    options = Options(schedule="pipedream-2bw", stages=stages, microbatch_size=1, recompute=False)
    machines = cluster((stages, bandwidth))
    plan = on_paper("pipedream-2bw", PlanningProblem(profile=model, cluster=machines, batch_size=8, options=options))
    assert isinstance(plan, Plan)
    best_s = min(slowest_s(model, path, bandwidth) for path in paths)
    assert best_s * (1 - 1e-9) <= plan.closed_form.time_per_microbatch_s <= best_s * (1 + 2e-4)


@given(graphs(), st.sampled_from([0.5, 2.0, 16.0]), st.sampled_from([None, "1f1b", "pipedream-2bw"]))
@examples(100)
def test_cuts_anywhere_are_never_worse_than_those_of_one_tensor(
    model: Profile, bandwidth: float, schedule: str | None
) -> None:
    rates, played = [], []
    for cuts in ("single-tensor", "any"):
        options = Options(cuts=cuts, schedule=schedule, microbatch_size=1)
        problem = PlanningProblem(profile=model, cluster=cluster((4, bandwidth)), batch_size=8, options=options)
        plan = on_paper("pipedream-2bw", problem)
        assert isinstance(plan, Plan)
        rates.append(plan.closed_form.throughput_samples_per_s)
        answer = solve("pipedream-2bw", problem)
        assert isinstance(answer, Plan) and answer.throughput_samples_per_s is not None
        played.append(answer.throughput_samples_per_s)
    assert rates[1] >= rates[0] * (1 - 1e-9)
    assert played[1] >= played[0] * (1 - 0.005)


@given(graphs(), st.sampled_from(["pipedream-2bw", "gpipe"]), st.sampled_from(["any", "single-tensor"]))
@examples(100)
def test_a_plan_says_what_its_stages_cost_between_their_cuts(model: Profile, planner: str, cuts: str) -> None:
    problem = problem_of(model, Options(cuts=cuts, microbatch_size=1), devices=4)
    plan = on_paper(planner, problem)
    assert isinstance(plan, Plan) and plan.order is not None
    assert plan.costs == costs_of(plan, model, problem.cluster)
    before = [frozenset(plan.order[: stage.start]) for stage in plan.stages]
    for cost, inside in list(zip(plan.costs, before, strict=True))[1:]:
        assert cost.input_bytes == crossing(model, inside)
        assert cost.gradient_transfer_s == crossing(model, inside) / 100.0
    assert all(inside in cuts_by_definition(model) for inside in before)
    played = {finding.what: finding.holds for finding in verify(plan, problem)}
    assert played["origin"] and played["play"]


def test_a_plan_keeps_the_profiles_order_where_its_stages_allow_it() -> None:
    """
    0 -+- 1 (2) -+- 4    fewest bytes cross in the order 0 2 1 3 4; stages that end with 0, or with 3, need no other
       +- 2 (1) -+       than the profile's
    """
    cells = [Cell(forward_s=s, backward_s=0, output_bytes=size) for s, size in ((4, 1), (1, 2), (1, 1), (1, 1), (1, 1))]
    model = graph(cells, ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4)))
    plans = [
        on_paper("exact", problem_of(model, Options(forced_cuts=(cut,), stages=2, microbatch_size=1)))
        for cut in (1, 2, 4)
    ]
    assert [plan.order for plan in plans if isinstance(plan, Plan)] == [
        (0, 1, 2, 3, 4),
        (0, 2, 1, 3, 4),
        (0, 1, 2, 3, 4),
    ]


def test_exact_counts_for_pipedream_what_pipedream_does() -> None:
    """
    0 (1 s) -+- 1 (5 s) -+- 3 (1 s)
             +- 2 (5 s) -+             the output of 0 passes through no stage, and crosses with that of 1
    """
    cells = [
        Cell(forward_s=s, backward_s=0, weight_bytes=10**6, output_bytes=out, activation_bytes=out)
        for s, out in ((1, 3), (5, 4), (5, 9), (1, 0))
    ]
    problem = replace(problem_of(graph(cells, DIAMOND, input_bytes=2)), batch_size=1)
    solved, plan = (
        on_paper("exact", replace(problem, options=Options(schedule="pipedream"))),
        on_paper("pipedream", problem),
    )
    assert isinstance(solved, Plan) and isinstance(plan, Plan)
    assert solved.stages == plan.stages and solved.order == plan.order
    assert solved.costs == plan.costs
    assert solved.closed_form == plan.closed_form
    assert solved.certificate is not None
    assert solved.certificate.method == "recurrence over devices on one order of the graph"
    assert "not at any of its cuts" in solved.certificate.claim


def test_unequal_devices_share_a_graph_between_its_branches() -> None:
    """
    0 (1 s) -+- 1 (8 s) -+- 3 (1 s)     {0, 1} take 9 s on the fast device, {2, 3} as many on the one that is half as
             +- 2 (3.5 s)+              fast
    """
    cells = [Cell(forward_s=s, backward_s=0, output_bytes=1) for s in (1, 8, 3.5, 1)]
    options = Options(stages=2, microbatch_size=1, recompute=False)
    chain = mixed_problem(cells, (Gpu(name="slow", slowness=2.0), Gpu(name="fast")), options=options)
    others = tuple(replace(other, edges=DIAMOND) for other in chain.other_profiles)
    plan = on_paper("exact", replace(chain, profile=replace(chain.profile, edges=DIAMOND), other_profiles=others))
    assert isinstance(plan, Plan) and plan.order == (0, 1, 2, 3)
    assert [(stage.start, stage.stop, stage.device) for stage in plan.stages] == [(0, 2, "fast"), (2, 4, "slow")]
    assert [cost.forward_s for cost in plan.costs] == [9.0, 9.0]


def test_a_stage_pays_for_the_tensors_that_pass_through_it() -> None:
    """
    0 -+- 1 -- 2 -+- 3      the output of 0 is read by the last stage: the two in between receive and send it on
       +----------+
    """
    cells = [Cell(weight_bytes=10**6, output_bytes=size, activation_bytes=1) for size in (100, 10, 20, 0)]
    model = graph(cells, ((0, 1), (1, 2), (2, 3), (0, 3)))
    plan = on_paper("gpipe", problem_of(model, Options(stages=4, microbatch_size=1), devices=4))
    assert isinstance(plan, Plan)
    assert [cost.input_bytes for cost in plan.costs] == [0, 100, 110, 120]
    assert [cost.activation_transfer_s for cost in plan.costs] == [1.0, 1.1, 1.2, 0.0]
    held = [stage.memory.activations - 1 for stage in plan.stages if stage.memory]
    assert held[1:] == [4 * cost.input_bytes for cost in plan.costs[1:]]


def test_forced_and_forbidden_cuts_are_places_of_the_order() -> None:
    model = graph(CELLS, RESIDUAL)
    free = on_paper("exact", problem_of(model, Options(stages=2, microbatch_size=1)))
    assert isinstance(free, Plan)
    cut = free.stages[1].start
    for options, starts in ((Options(forced_cuts=(2,)), {2}), (Options(forbidden_cuts=(cut,)), set(range(6)) - {cut})):
        for cuts in ("any", None):
            for planner in ("exact", "auto"):
                asked = replace(options, stages=2, microbatch_size=1, cuts=cuts)
                plan = solve(planner, problem_of(model, asked))
                assert isinstance(plan, Plan) and plan.stages[1].start in starts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            Options(forced_cuts=(2,), cuts="single-tensor"),
            r"forced_cuts: must be places that one tensor crosses, \[1, 5\], got 2",
        ),
        (Options(forced_cuts=(6,)), "forced_cuts: must be places in the order in which a graph is cut, 1 to 5, got 6"),
        (
            Options(forbidden_cuts=(9,)),
            "forbidden_cuts: must be places in the order in which a graph is cut, 1 to 5, got 9",
        ),
    ],
)
def test_a_cut_that_the_graph_does_not_have_is_refused(options: Options, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        on_paper("exact", problem_of(graph(CELLS, RESIDUAL), options))


def test_a_graph_of_too_many_blocks_for_the_solver_is_cut_where_one_tensor_crosses() -> None:
    edges = [(3 * index + source, 3 * index + reader) for index in range(90) for source, reader in DIAMOND]
    model = graph([Cell(output_bytes=1)] * 271, tuple(edges))
    plan = on_paper("exact", problem_of(model, Options(stages=2, microbatch_size=1)))
    assert isinstance(plan, Plan) and plan.stages[0].stop % 3 in (0, 1)
    assert plan == on_paper("exact", problem_of(model, Options(stages=2, microbatch_size=1, cuts="single-tensor")))
    with pytest.raises(InvalidInputError, match=r"profile\.blocks: must be at most 256 for the planner exact, got 271"):
        on_paper("exact", problem_of(model, Options(stages=2, microbatch_size=1, cuts="any")))


@pytest.mark.parametrize("schedule", sorted(CHUNKED))
def test_ranks_of_several_stages_share_a_graph(schedule: str) -> None:
    """The planner exact failed: it looked for a better order by as many links as there are stages, not ranks."""
    plan = solve("exact", problem_of(graph(CELLS, RESIDUAL), Options(schedule=schedule, chunks=2, stages=2)))
    assert isinstance(plan, Plan)
    assert (plan.schedule, plan.chunks, plan.depth) == (schedule, 2, 4)


def test_a_chain_is_asked_as_it_is() -> None:
    model = profile(CELLS)
    plan = on_paper("gpipe", problem_of(model, Options(stages=2, microbatch_size=1)))
    assert isinstance(plan, Plan) and plan.order is None
    with pytest.raises(InvalidInputError, match="cuts: is not an option of the planner gpipe"):
        on_paper("gpipe", problem_of(model, Options(cuts="single-tensor")))
    with pytest.raises(InvalidInputError, match="cuts: is an option for a model that is a graph"):
        on_paper("pipedream", problem_of(model, Options(cuts="any", microbatch_size=1)))


def test_a_graph_that_does_not_fit_is_answered_with_the_reasons() -> None:
    for planner in ("pipedream", "gpipe", "pipedream-2bw"):
        answer = on_paper(planner, problem_of(graph(CELLS, RESIDUAL), Options(microbatch_size=1), memory_bytes=20))
        assert isinstance(answer, Infeasible) and answer.reasons


def test_auto_plans_a_graph_in_one_order_and_its_certificate_says_so() -> None:
    plan = solve("auto", problem_of(graph(CELLS, RESIDUAL)))
    assert isinstance(plan, Plan) and plan.order is not None
    assert plan.certificate is not None and "on one order of the graph" in plan.certificate.method
    assert plan.profile_id == content_id(graph(CELLS, RESIDUAL))
