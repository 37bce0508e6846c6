"""The recurrence with memory finds what its steps say, and stages fit to the byte."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.arrays import FloatArray
from pipeplan.costs.memory import minibatches_in_flight
from pipeplan.documents.plan import Infeasible
from pipeplan.planners.pipedream.fitting import DevicesNeeded, Law, fewest, smallest
from pipeplan.planners.pipedream.memory_recurrence import InnerTables, MemoryRecurrence
from pipeplan.planners.pipedream.parts import search_of
from pipeplan.planners.pipedream.space import LevelLinks
from pipeplan.planners.pipedream.states import States
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.builders import Cell, cluster, profile
from tests.pipeplan.planners.every_partition import copies_of
from tests.pipeplan.planners.pipedream.test_partition import chains, graphs
from tests.properties import examples

laws = st.builds(
    Law,
    fixed=st.tuples(*[st.sampled_from([0, 0, 1, 2])] * 4, st.sampled_from([0, 1])).map(copies_of),
    each=st.tuples(*[st.sampled_from([0, 1, 2])] * 4, st.just(0)).map(copies_of),
    limit_bytes=st.integers(1, 60).map(float),
)


def step_by_step(tables: InnerTables, units: int) -> FloatArray:
    """V in seconds from each state to the end, on one level: of the shape (units + 1, states)."""
    states = len(tables.space)
    boundaries_s = tables.space.boundaries_s(0)
    best = np.full((units + 1, states), np.inf)
    for left in range(1, units + 1):
        for first in range(1, left + 1):
            stage_s = tables.stage_s(0, first, left - first, 0)
            later_s = np.maximum(best[left - first], boundaries_s)
            if first == left:
                later_s = np.where(np.arange(states) == tables.space.last, 0.0, np.inf)
            best[left] = np.minimum(best[left], np.maximum(stage_s, later_s).min(axis=1))
    return best


@examples(200)
@given(st.one_of(chains(most=8), graphs()), st.integers(1, 6), laws, st.booleans())
def test_the_stages_are_as_fast_as_the_recurrence_says(states: States, units: int, law: Law, fewer: bool) -> None:
    search = search_of(states, [LevelLinks(units=units, bandwidth_bytes_per_s=2.0)], law=law)
    assert search.memory is not None
    tables = InnerTables(space=search.space, memory=search.memory)
    every = step_by_step(tables, search.devices)[:, 0]
    recurrence = MemoryRecurrence(tables=tables, level=0, units=search.devices, start=0, stop=search.space.last)
    found = recurrence.optimum(fewer=fewer)
    least_s = every.min() if fewer else every[-1]
    assert (found is None) == np.isinf(least_s)
    needed = DevicesNeeded(search.memory, search.space, search.devices)
    assert (needed.stages(law.limit_bytes) is not None) == bool(np.isfinite(every).any())
    if found is None:
        return
    cost_s, stages = found
    downstream, slowest_s = sum(devices for _, _, devices in stages), 0.0
    for start, stop, devices in stages:
        downstream -= devices
        slowest_s = max(slowest_s, float(tables.stage_s(0, devices, downstream, 0)[start, stop]))
        slowest_s = max(slowest_s, float(search.space.boundaries_s(0)[start]) if start else 0.0)
    assert cost_s == least_s
    assert slowest_s <= cost_s * (1 + 1e-11)


@examples(100)
@given(chains(most=6), laws, st.integers(0, 5))
def test_a_stage_fits_to_the_byte(states: States, law: Law, downstream: int) -> None:
    search = search_of(states, [LevelLinks(units=2, bandwidth_bytes_per_s=2.0)], law=law)
    assert search.memory is not None
    every = np.arange(len(search.space))
    held_bytes = search.memory.held_bytes(every, every, 1.0 + downstream)
    fits = (every[:, None] < every) & (held_bytes <= law.limit_bytes)
    stage_s = InnerTables(space=search.space, memory=search.memory).stage_s(0, 1, downstream, 0)
    assert (np.isfinite(stage_s) == fits).all()


@examples(200)
@given(st.one_of(chains(most=8), graphs()), st.integers(1, 6), laws)
def test_the_smallest_feasible_limit_gives_the_stages_that_hold_least(states: States, units: int, law: Law) -> None:
    search = search_of(states, [LevelLinks(units=units, bandwidth_bytes_per_s=2.0)], law=law)
    memory, space = search.memory, search.space
    assert memory is not None
    every = np.arange(len(space))
    fixed, each = memory.fixed_and_each(every, every)

    def needed(limit: float) -> float:
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(fewest(np.floor((limit - fixed) / each), space)[0])

    stages = smallest(memory, space, search.devices)
    held = minibatches_in_flight([devices for _, _, devices in stages])
    most = max(
        float(memory.held_bytes(np.array([start]), np.array([stop]), count)[0, 0])
        for (start, stop, _), count in zip(stages, held, strict=True)
    )
    assert sum(devices for _, _, devices in stages) == search.devices
    assert needed(most) <= search.devices
    if most >= 2:
        assert needed(most - 1) > search.devices
    for limit in (law.limit_bytes, most, most - 1, 2 * most):
        found = DevicesNeeded(memory, space, search.devices).stages(limit)
        assert (found is not None) == (needed(limit) <= search.devices)
        if found is not None:
            held = minibatches_in_flight([devices for _, _, devices in found])
            for (start, stop, _), count in zip(found, held, strict=True):
                assert memory.held_bytes(np.array([start]), np.array([stop]), count)[0, 0] <= limit


def test_a_long_chain_whose_blocks_need_ever_more_devices_is_answered() -> None:
    # a block needs as many devices as are downstream of it, so the number doubles with each: 2^69 for 70 blocks
    found = profile([Cell(activation_bytes=10)] * 70)
    problem = PlanningProblem(profile=found, cluster=cluster((80, 1.0), memory_bytes=21), batch_size=1)
    answer = solve("pipedream", problem)
    assert isinstance(answer, Infeasible)
    assert answer.reasons[0].missing_bytes
