"""The recurrence with memory looks at few states: what it finds within a limit is what looking at all of them finds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.arrays import FloatArray
from pipeplan.planners.pipedream.fitting import Law, fits_any
from pipeplan.planners.pipedream.memory_recurrence import MemoryProblem, Recurrence
from pipeplan.planners.pipedream.partition import search_of
from pipeplan.planners.pipedream.space import LevelLinks
from pipeplan.planners.pipedream.states import States
from tests.pipeplan.planners.pipedream.test_partition import chains, graphs

laws = st.builds(
    Law,
    fixed=st.tuples(*[st.sampled_from([0, 0, 1, 2])] * 4),
    each=st.tuples(*[st.sampled_from([0, 1, 2])] * 4),
    limit_bytes=st.integers(1, 60).map(float),
)


def looking_at_all(tables: Recurrence, units: int) -> FloatArray:
    """V by units and first state, step by step, on one level."""
    states = len(tables.space)
    boundaries_s = tables.boundaries_s(0)
    best = np.full((units + 1, states), np.inf)
    for left in range(1, units + 1):
        for first in range(1, left + 1):
            stage_s = tables.stage_s(0, first, left - first, 0)
            later_s = np.maximum(best[left - first], boundaries_s)
            if first == left:
                later_s = np.where(np.arange(states) == tables.space.last, 0.0, np.inf)
            best[left] = np.minimum(best[left], np.maximum(stage_s, later_s).min(axis=1))
    return best


@settings(max_examples=200, deadline=None)
@given(st.one_of(chains(most=8), graphs()), st.integers(1, 6), laws, st.sampled_from([0.5, 1.0, 2.0, 4.0, 9.0, np.inf]))
def test_what_is_within_a_limit_is_found_as_if_all_states_were_looked_at(
    states: States, units: int, law: Law, limit_s: float
) -> None:
    search = search_of(states, [LevelLinks(units=units, bandwidth_bytes_per_s=2.0)], law=law)
    assert search.memory is not None
    units = search.space.levels[-1].units
    tables = Recurrence(space=search.space, memory=search.memory)
    every = looking_at_all(tables, units)[:, 0]
    problem = MemoryProblem(tables=tables, level=0, start=0, stop=search.space.last, beyond=0)
    found = problem.optimum_s(units, limit_s)[:, 0]
    assert (found[every <= limit_s] == every[every <= limit_s]).all()
    assert (found[every > limit_s] > limit_s).all() or limit_s == np.inf
    assert fits_any(search.memory, search.space, units) == bool(np.isfinite(every).any())


@settings(max_examples=100, deadline=None)
@given(chains(most=6), laws, st.integers(0, 5))
def test_a_stage_fits_to_the_byte(states: States, law: Law, behind: int) -> None:
    search = search_of(states, [LevelLinks(units=2, bandwidth_bytes_per_s=2.0)], law=law)
    assert search.memory is not None
    every = np.arange(len(search.space))
    held_bytes = search.memory.held_bytes(every, every, 1.0 + behind)
    fits = (every[:, None] < every) & (held_bytes <= law.limit_bytes)
    stage_s = Recurrence(space=search.space, memory=search.memory).stage_s(0, 1, behind, 0)
    assert (np.isfinite(stage_s) == fits).all()
