"""Messages: PipeDream's plans fit with the messages that their streams have under way, and the bound stays true."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf, prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeplan.costs.graph import boundaries
from pipeplan.documents.plan import Infeasible, Plan, Stage
from pipeplan.documents.profile import Profile
from pipeplan.documents.stage_memory import StageMemory
from pipeplan.planners.messages import with_messages
from pipeplan.planners.pipedream.parts import LevelShare
from pipeplan.planners.pipedream.planner import cut_model
from pipeplan.planners.pipedream.terms import stage
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.programs.in_transit import in_transit, windows
from pipeplan.schedules.registry import schedule_named
from pipeplan.simulation.predict import predict, program_of
from tests.pipeplan.builders import Cell, cells, cluster, profile
from tests.properties import examples

PIPEDREAM = schedule_named("pipedream")


def _problem(measured: Profile, devices: int, memory_bytes: int = 10**15) -> PlanningProblem:
    options = Options(schedule="pipedream", optimizer="adam", semantics="paper")
    machines = cluster((devices, 1.0), memory_bytes=memory_bytes)
    return PlanningProblem(profile=measured, cluster=machines, batch_size=1, options=options)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for inside in combinations(range(1, total), parts - 1):
        stops = (0, *inside, total)
        yield tuple(b - a for a, b in pairwise(stops))


def _every_plan(problem: PlanningProblem, *, straight: bool = False) -> Iterator[tuple[float, int]]:
    """The slowest of every partition's stages and boundaries, and the bytes of its largest stage with messages."""
    states, blocks, devices = cut_model(problem).states, len(problem.profile.blocks), problem.cluster.devices
    speed = problem.cluster.levels[0].bandwidth_bytes_per_s
    for depth in (devices,) if straight else range(1, min(devices, blocks) + 1):
        for inside in combinations(range(1, blocks), depth - 1):
            stops = (0, *inside, blocks)
            for replicas in [(1,) * depth] if straight else _compositions(devices, depth):
                slowest_s, stages = 0.0, []
                for index, count in enumerate(replicas):
                    a, b = stops[index], stops[index + 1]
                    exchange_s = 2.0 * (count - 1) / count * (states.weight_bytes[b] - states.weight_bytes[a]) / speed
                    stage_s = max(states.compute_s[b] - states.compute_s[a], exchange_s) / count
                    boundary_s = 2.0 * states.boundary_bytes[a] / speed
                    slowest_s = max(slowest_s, float(stage_s), float(boundary_s))
                    share = LevelShare(start=a, stop=b, replicas=count, time_s=0.0)
                    stages.append(stage(problem, states, share, -(-sum(replicas[index:]) // count), (a, b)))
                whole = with_messages(problem, stages, PIPEDREAM, 1)
                yield slowest_s, max(each.memory_bytes for each in whole)


@examples(150)
@given(
    blocks=st.lists(cells(), min_size=1, max_size=5),
    devices=st.integers(1, 6),
    planner=st.sampled_from(["pipedream", "exact"]),
)
def test_a_plan_counts_no_less_than_its_streams_hold_and_have_in_transit(
    blocks: list[Cell], devices: int, planner: str
) -> None:
    read_bytes = [0, *(2 * block.output_bytes for block in blocks)]
    measured = profile(
        [
            replace(block, forward_s=1.0, activation_bytes=block.activation_bytes + read)
            for block, read in zip(blocks, read_bytes, strict=False)
        ]
    )
    plan = solve(planner, _problem(measured, devices))
    assert isinstance(plan, Plan)
    batches = 3 * devices + 3
    program, lanes = program_of(plan, batches=batches), predict(plan, batches=batches).lanes
    sizes = boundaries(measured, 1, plan.stages, None)
    for stream, lane in zip(program.streams, lanes, strict=True):
        counts = in_transit(stream.instructions, windows=windows(program, stream), recompute=False)
        moved = sizes[stream.stage]
        moved_bytes = moved.received_bytes, moved.sent_bytes, moved.kept_output_bytes
        held = [now + each.bytes(*moved_bytes) for now, each in zip(lane.memory_bytes, counts, strict=True)]
        memory = plan.stages[stream.stage].memory
        assert memory is not None
        assert max(held) <= memory.total - memory.transient


TIGHT = {
    "blocks": st.lists(cells(), min_size=2, max_size=5),
    "devices": st.integers(2, 5),
    "share": st.floats(0.0, 1.0),
}


def _tight(blocks: list[Cell], devices: int, share: float, *levels: int) -> tuple[PlanningProblem, float]:
    """A problem with some of the memory that its partitions take, and the best time of those that fit; infinite if none
    do.
    """
    measured = profile([replace(block, forward_s=1.0) for block in blocks])
    every = list(_every_plan(_problem(measured, devices)))
    sizes = [size for _, size in every]
    limit = max(min(sizes) - 1 + int(share * (max(sizes) - min(sizes) + 1)), 1)
    problem = _problem(measured, devices, memory_bytes=limit)
    if levels:
        problem = replace(problem, cluster=cluster(*((size, 1.0) for size in levels), memory_bytes=limit))
    return problem, min((slowest_s for slowest_s, size in every if size <= limit), default=inf)


@examples(200)
@given(**TIGHT)
def test_the_answer_is_the_best_that_fits_with_its_messages(blocks: list[Cell], devices: int, share: float) -> None:
    problem, fitting_s = _tight(blocks, devices, share)
    answer = solve("pipedream", problem)
    assert isinstance(answer, Infeasible) == (fitting_s == inf)
    if isinstance(answer, Plan):
        assert max(stage.memory_bytes for stage in answer.stages) <= problem.cluster.device.memory_bytes
        assert answer.closed_form.time_per_microbatch_s == pytest.approx(fitting_s, rel=1e-9)
        assert answer.certificate is not None
        assert answer.certificate.gap <= 1e-9


@examples(100)
@given(**TIGHT, levels=st.sampled_from([(2, 2), (2, 3), (3, 2)]))
def test_on_several_levels_all_stages_fit_and_none_is_there_only_where_none_fits(
    blocks: list[Cell], devices: int, share: float, levels: tuple[int, int]
) -> None:
    problem, fitting_s = _tight(blocks, prod(levels), share, *levels)
    answer = solve("pipedream", problem)
    assert isinstance(answer, Infeasible) == (fitting_s == inf)
    if isinstance(answer, Plan):
        assert max(stage.memory_bytes for stage in answer.stages) <= problem.cluster.device.memory_bytes


@examples(100)
@given(**TIGHT, recompute=st.sampled_from([None, False]))
def test_the_solvers_plans_fit_with_their_messages_and_none_is_below_its_bound(
    blocks: list[Cell], devices: int, share: float, recompute: bool | None
) -> None:
    """Where no stage may recompute, its answer is the best."""
    problem, fitting_s = _tight(blocks, devices, share)
    problem = replace(problem, options=replace(problem.options, recompute=recompute))
    answer = solve("exact", problem)
    if isinstance(answer, Infeasible):
        assert fitting_s == inf
        return
    assert max(stage.memory_bytes for stage in answer.stages) <= problem.cluster.device.memory_bytes
    assert answer.certificate is not None
    assert answer.certificate.bound <= fitting_s * (1 + 1e-6)
    assert answer.certificate.value <= fitting_s * (1 + 1e-6)
    if recompute is False:
        assert answer.certificate.value == pytest.approx(fitting_s, rel=1e-6)
        assert answer.certificate.gap <= 1e-6


@examples(100)
@given(**TIGHT)
def test_on_fewer_devices_the_answer_is_the_best_that_fits_as_well(
    blocks: list[Cell], devices: int, share: float
) -> None:
    problem, _ = _tight(blocks, devices, share)
    limit = problem.cluster.device.memory_bytes
    fewer = replace(problem, options=replace(problem.options, fewer_machines=True))
    every = [_every_plan(_problem(problem.profile, count, memory_bytes=limit)) for count in range(1, devices + 1)]
    best = min((s for some in every for s, size in some if size <= limit), default=inf)
    answer = solve("pipedream", fewer)
    assert isinstance(answer, Infeasible) == (best == inf)
    if isinstance(answer, Plan):
        assert answer.closed_form.time_per_microbatch_s == pytest.approx(best, rel=1e-9)


@examples(100)
@given(**TIGHT)
def test_a_straight_pipeline_is_the_best_that_fits_with_its_messages(
    blocks: list[Cell], devices: int, share: float
) -> None:
    assume(devices <= len(blocks))
    problem, _ = _tight(blocks, devices, share)
    limit = problem.cluster.device.memory_bytes
    straight = replace(problem, options=replace(problem.options, straight=True))
    best = min((s for s, size in _every_plan(problem, straight=True) if size <= limit), default=inf)
    answer = solve("pipedream", straight)
    assert isinstance(answer, Infeasible) == (best == inf)
    if isinstance(answer, Plan):
        assert answer.closed_form.time_per_microbatch_s == pytest.approx(best, rel=1e-9)


def test_the_messages_of_many_workers_count_on_each_edge() -> None:
    """Three workers before one: memory posted ahead and free on three edges, and three times two gradients."""
    alone = [
        Stage(start=0, stop=1, replicas=3, memory=StageMemory()),
        Stage(start=1, stop=2, replicas=1, memory=StageMemory()),
    ]
    problem = _problem(profile([Cell(output_bytes=10), Cell()]), 4)
    first, last = with_messages(problem, alone, PIPEDREAM, 1)
    assert first.memory is not None and last.memory is not None
    assert first.memory.buffers == 10 * (3 + 2)
    assert last.memory.buffers == 10 * (3 * (3 + 2) - 1 + 2)
