"""Planners of chains, asked about graphs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from pipeplan.planners.on_chain import chain_of
from pipeplan.planners.pipedream.states import cut_states
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.builders import PLENTY, Cell, cluster, profile
from tests.pipeplan.graphs import Edges, graph, graphs

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


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_the_chain_of_a_graph_has_the_states_that_one_tensor_crosses(model: Profile) -> None:
    chain, states = cut_states(chain_of(model), 1).states, cut_states(model, 1, cuts="single-tensor").states
    for name in ("compute_s", "weight_bytes", "activation_bytes", "boundary_bytes", "input_bytes"):
        assert getattr(chain, name).tolist() == getattr(states, name).tolist()


@pytest.mark.parametrize("planner", ["pipedream-2bw", "gpipe"])
def test_an_answer_for_the_chain_is_put_back_into_the_graphs_blocks(planner: str) -> None:
    model = graph(CELLS, RESIDUAL)
    options = Options(stages=2, microbatch_size=1)
    plan, on_chain = solve(planner, problem_of(model, options)), solve(planner, problem_of(chain_of(model), options))
    assert isinstance(plan, Plan) and isinstance(on_chain, Plan)
    places = (0, 1, 5, 6)
    assert [(s.start, s.stop) for s in plan.stages] == [(places[s.start], places[s.stop]) for s in on_chain.stages]
    assert plan.order == (0, 1, 2, 3, 4, 5)
    assert plan.profile_id == content_id(model)
    assert plan.costs == on_chain.costs
    assert solve(planner, problem_of(model, replace(options, cuts="single-tensor"))) == plan


def test_pipedream_on_single_tensors_is_pipedream_on_the_chain() -> None:
    model = graph(CELLS, RESIDUAL)
    plan = solve("pipedream", problem_of(model, Options(cuts="single-tensor", microbatch_size=1)))
    on_chain = solve("pipedream", problem_of(chain_of(model), Options(microbatch_size=1)))
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
    plan = solve("pipedream", replace(problem_of(model), batch_size=1))
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
    plan = solve("pipedream", replace(problem_of(graph(cells, ((0, 2), (1, 3), (2, 3)))), batch_size=1))
    assert isinstance(plan, Plan) and plan.order is not None
    assert [(s.start, s.stop) for s in plan.stages] == [(0, 2), (2, 4)]
    assert plan.closed_form.time_per_microbatch_s == 8.0


@pytest.mark.parametrize(
    ("planner", "options", "message"),
    [
        ("gpipe", Options(cuts="any"), "cuts: must be single-tensor for a planner of chains, got 'any'"),
        ("exact", Options(forced_cuts=(2,)), r"forced_cuts: must be places that one tensor crosses, \[1, 5\], got 2"),
    ],
)
def test_what_a_chain_cannot_say_is_refused(planner: str, options: Options, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        solve(planner, problem_of(graph(CELLS, RESIDUAL), options))


def test_a_chain_is_asked_as_it_is() -> None:
    model = profile(CELLS)
    plan = solve("gpipe", problem_of(model, Options(stages=2, microbatch_size=1)))
    assert isinstance(plan, Plan) and plan.order is None
    with pytest.raises(InvalidInputError, match="cuts: is not an option of the planner gpipe"):
        solve("gpipe", problem_of(model, Options(cuts="single-tensor")))
    with pytest.raises(InvalidInputError, match="cuts: is an option for a model that is a graph"):
        solve("pipedream", problem_of(model, Options(cuts="any", microbatch_size=1)))


def test_a_graph_that_does_not_fit_is_answered_with_the_reasons() -> None:
    for planner in ("pipedream", "gpipe", "pipedream-2bw"):
        answer = solve(planner, problem_of(graph(CELLS, RESIDUAL), Options(microbatch_size=1), memory_bytes=20))
        assert isinstance(answer, Infeasible) and answer.reasons


def test_auto_plans_graphs() -> None:
    plan = solve("auto", problem_of(graph(CELLS, RESIDUAL)))
    assert isinstance(plan, Plan) and plan.order is not None
    assert plan.profile_id == content_id(graph(CELLS, RESIDUAL))
