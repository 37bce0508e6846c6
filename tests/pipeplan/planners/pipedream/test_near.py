"""The moves from a PipeDream plan to others."""

from dataclasses import replace

import pytest

from pipeplan.documents.plan import Plan
from pipeplan.planners.pipedream.near import Near, StageLayout
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.builders import Cell, cluster, profile
from tests.pipeplan.graphs import graph
from tests.pipeplan.planners.on_paper import on_paper

CELL = Cell(forward_s=1.0, backward_s=2.0, weight_bytes=1, output_bytes=400, activation_bytes=1)


def near(options: Options) -> Near:
    """The moves of eight equal blocks on four devices."""
    problem = PlanningProblem(profile=profile([CELL] * 8), cluster=cluster((4, 1000.0)), batch_size=1, options=options)
    plan = on_paper("pipedream", problem)
    assert isinstance(plan, Plan)
    return Near.of(problem, plan)


def test_blocks_and_devices_change_hands_and_stages_merge_and_split() -> None:
    every = set(near(Options()).moved(StageLayout((4, 8), ((0, 2), (1, 3)))))
    kept = ((0, 2), (1, 3))
    assert {StageLayout((3, 8), kept), StageLayout((5, 8), kept)} <= every
    assert {
        StageLayout((4, 8), ((0,), (1, 2, 3))),
        StageLayout((4, 8), ((0, 1, 2), (3,))),
    } <= every  # counted on in a row
    assert StageLayout((4, 8), ((2,), (1, 3, 0))) in every  # the others stay where they are
    assert StageLayout((8,), ((0, 1, 2, 3),)) in every
    assert {StageLayout((2, 4, 8), ((0,), (1,), (2, 3))), StageLayout((2, 4, 8), ((0,), (2,), (1, 3)))} <= every
    assert all(sorted(sum(each.devices, ())) == [0, 1, 2, 3] for each in every)
    assert all(0 < before < after for each in every for before, after in zip(each.stops, each.stops[1:], strict=False))


def test_a_block_moves_past_the_stages_between() -> None:
    every = set(near(Options()).moved(StageLayout((2, 4, 8), ((0,), (1,), (2, 3)))))
    assert StageLayout((3, 5, 8), ((0,), (1,), (2, 3))) in every


@pytest.mark.parametrize(("fewer", "depths"), [(False, {4}), (True, {3, 4})])
def test_straight_stages_keep_one_device_each(fewer: bool, depths: set[int]) -> None:
    moves = near(Options(straight=True, fewer_machines=fewer))
    every = list(moves.moved(StageLayout((2, 4, 6, 8), ((0,), (1,), (2,), (3,)))))
    assert {len(each.stops) for each in every} == depths
    assert all(set(each.replicas) == {1} for each in every)
    onto_an_idle_one = list(moves.moved(StageLayout((4, 8), ((0,), (1,)))))
    assert (StageLayout((2, 4, 8), ((0,), (1,), (2,))) in onto_an_idle_one) == fewer


def test_the_plans_near_one_fit_their_devices() -> None:
    roomy = PlanningProblem(
        profile=profile([replace(CELL, activation_bytes=100)] * 8),
        cluster=cluster((4, 1000.0)),
        batch_size=1,
        options=Options(straight=True),
    )
    plan = solve("pipedream", roomy)
    assert isinstance(plan, Plan)
    limit = max(stage.memory_bytes for stage in plan.stages)
    tight = replace(roomy, cluster=cluster((4, 1000.0), memory_bytes=limit))
    fitting, every = (list(Near.of(problem, plan).plans(plan)) for problem in (tight, roomy))
    assert [each.stages for each in fitting] == [
        each.stages for each in every if max(stage.memory_bytes for stage in each.stages) <= limit
    ]
    assert 0 < len(fitting) < len(every)


@pytest.mark.parametrize("cuts", [None, "single-tensor"])
def test_the_stages_of_a_graph_move_along_the_plans_order(cuts: str | None) -> None:
    """After its moves every stage still has what its blocks read; one tensor crosses where that is asked for."""
    edges = ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5), (5, 6))
    problem = PlanningProblem(
        profile=graph([CELL] * 7, edges),
        cluster=cluster((3, 1000.0)),
        batch_size=1,
        options=Options(straight=True, cuts=cuts),
    )
    plan = solve("pipedream", problem)
    assert isinstance(plan, Plan)
    plans = list(Near.of(problem, plan).plans(plan))
    assert plans
    for each in plans:
        assert each.order is not None
        stage_of = {
            block: index for index, stage in enumerate(each.stages) for block in each.order[stage.start : stage.stop]
        }
        assert all(stage_of[source] <= stage_of[reader] for source, reader in edges)
        if cuts is not None:  # between 1 and 4 two tensors cross
            assert len({stage_of[block] for block in (2, 3)}) == 1
