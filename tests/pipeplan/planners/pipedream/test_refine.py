"""Cut and refine: plans of graphs whose cuts are not listed, between a bound and what all cuts would give."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.planners.pipedream.partition import partition
from pipeplan.planners.pipedream.parts import Partition
from pipeplan.planners.pipedream.planner import pipedream
from pipeplan.planners.pipedream.refine import Refined, refine
from pipeplan.planners.pipedream.states import cut_states
from pipeplan.planners.pipedream.terms import search
from pipeplan.planners.problem import Options, PlanningProblem
from tests.pipeplan.builders import Cell, cluster, clusters
from tests.pipeplan.graphs import Edges, graph, graphs
from tests.properties import examples

NO_MORE = 1 + 1e-9


def problem_of(profile: Profile, machines: Cluster, options: Options | None = None) -> PlanningProblem:
    return PlanningProblem(profile=profile, cluster=machines, batch_size=1, options=options or Options())


def best(problem: PlanningProblem) -> Partition | None:
    """Over all cuts; None where none fits."""
    return partition(search(problem, cut_states(problem.profile, 1).states))


def of_a_line(problem: PlanningProblem) -> Partition | None:
    """Over the places of one order."""
    return partition(search(problem, cut_states(problem.profile, 1, at_most=1).states))


def refined(problem: PlanningProblem) -> Refined | None:
    """As if there were too many cuts to list."""
    return refine(problem, 1, cut_states(problem.profile, 1, at_most=1))


@st.composite
def problems(draw: st.DrawFn) -> PlanningProblem:
    options = Options(
        synchronisation=draw(st.sampled_from(["parameter-server", "all-reduce"])),
        fewer_machines=draw(st.booleans()),
        memory=draw(st.sampled_from(["training", "paper"])),
    )
    return problem_of(draw(graphs(blocks_at_most=8)), draw(clusters(8)), options)


@pytest.mark.campaign
@given(problems())
@examples(60)
def test_the_optimum_over_all_cuts_lies_between_bound_and_plan(problem: PlanningProblem) -> None:
    optimum, line, found = best(problem), of_a_line(problem), refined(problem)
    if found is None:
        assert line is None
        return
    assert optimum is not None
    assert found.certificate.bound <= optimum.cost_s * NO_MORE
    assert optimum.cost_s <= found.found.cost_s * NO_MORE
    assert found.certificate.value == found.found.cost_s
    assert line is None or found.found.cost_s <= line.cost_s


def branches(count: int, length: int, *, output_bytes: int = 1) -> tuple[list[Cell], Edges]:
    """A block, so many branches of so many blocks, and a block after them; costs differ from branch to branch."""
    last = count * length + 1
    edges: list[tuple[int, int]] = []
    for branch in range(count):
        places = [0, *range(1 + branch * length, 1 + (branch + 1) * length), last]
        edges += pairwise(places)
    cells = [
        Cell(forward_s=1 + place % 3, backward_s=2, weight_bytes=1 + place % 5, output_bytes=output_bytes)
        for place in range(last + 1)
    ]
    return cells, tuple(sorted(edges))


def test_cuts_are_added_around_a_plans_own() -> None:
    """One order goes through one branch after the other; the best cut takes a part of two of them."""
    #  0 -+- 1 (9 s) - 2 (1 s) -+- 5       The halves of 24 s are {0, 1, 3} and {2, 4, 5}: the order 0 1 2 3 4 5 has
    #     +- 3 (2 s) - 4 (10 s) +          no place with 12 s before it.
    seconds = (1, 9, 1, 2, 10, 1)
    cells = [Cell(forward_s=s, backward_s=0, weight_bytes=100, output_bytes=1) for s in seconds]
    edges: Edges = ((0, 1), (0, 3), (1, 2), (2, 5), (3, 4), (4, 5))
    problem = problem_of(graph(cells, edges), cluster((2, 4.0)))
    line, found = of_a_line(problem), refined(problem)
    assert line is not None and found is not None
    assert (line.cost_s, found.found.cost_s) == (13.0, 12.0)
    assert found.certificate.gap == 0.0
    assert [found.cuts.cut(share.stop) for share in found.found.shares] == [0b001011, 0b111111]


def test_a_planner_says_how_far_its_plan_of_a_large_graph_may_be_from_the_optimum() -> None:
    cells, edges = branches(4, 10, output_bytes=3)
    problem = problem_of(graph(cells, edges), cluster((4, 1.0)))
    plan = pipedream(problem)
    assert isinstance(plan, Plan) and plan.certificate is not None
    assert plan.certificate.method == "cut and refine"
    assert plan.certificate.bound <= plan.certificate.value == plan.closed_form.time_per_microbatch_s
    assert plan.order is not None and sorted(plan.order) == list(range(len(cells)))
    place = {block: index for index, block in enumerate(plan.order)}
    stage = [next(i for i, s in enumerate(plan.stages) if s.start <= place[b] < s.stop) for b in range(len(cells))]
    assert all(stage[source] <= stage[reader] for source, reader in edges)
    assert pipedream(problem) == plan


def test_the_memory_that_stages_need_bounds_the_plan() -> None:
    """Halves of all weights fit a device, not all of them: two stages, which weigh more on the time than the half."""
    cells, edges = branches(3, 4, output_bytes=1)
    weights = sum(cell.weight_bytes for cell in cells)
    machines = cluster((2, 1e6), memory_bytes=weights * 9 // 5)
    found = refined(problem_of(graph(cells, edges), machines, Options(memory="training")))
    free = refined(problem_of(graph(cells, edges), cluster((2, 1e6))))
    assert found is not None and free is not None
    assert (free.found.replicas, found.found.replicas) == ([2], [1, 1])
    assert found.certificate.gap < 0.1


@pytest.mark.parametrize("length", [1, 6])
def test_very_many_branches_get_an_answer(length: int) -> None:
    cells, edges = branches(200, length)
    plan = pipedream(problem_of(graph(cells, edges), cluster((4, 100.0))))
    assert isinstance(plan, Plan) and plan.certificate is not None
    assert plan.certificate.gap < 0.05
