"""Partition: PipeDream's partitioning: states on the levels of a network -> the stages with the least bottleneck.

It is A(N, M) of PipeDream's recurrence (2018, section 3.2), with the stages that reach it. On several levels it is the
later form (SOSP 2019, section 3.1), inside out: a server's pipeline for a part of the model is the unit of the level
around it. `space` has the formulas and numbers their steps. Five solvers share the work; `partition` chooses among
them.

Where we differ: stages must fit their devices, a stated rule chooses among equal optima (`from_end`), and a proof comes
with the answer.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray
from pipeplan.planners.pipedream.budget import BUDGET
from pipeplan.planners.pipedream.fitting import DevicesNeeded, FittingSearch, Memory, smallest
from pipeplan.planners.pipedream.from_end import FromEnd, fewest_sent
from pipeplan.planners.pipedream.memory_recurrence import InnerTables, MemoryRecurrence, downstream_each
from pipeplan.planners.pipedream.parts import (
    LevelPart,
    Partition,
    PartitionSearch,
    Proof,
    data_parallel,
    fits,
    held_bytes,
    held_bytes_apart,
    made,
    priced,
)
from pipeplan.planners.pipedream.probe import Stages, least_units, units_before
from pipeplan.planners.pipedream.recurrence import NOTHING, LevelSearch, Optimum
from pipeplan.planners.pipedream.space import ROUNDING, PartitionSpace
from pipeplan.planners.pipedream.straight import Straight


def partition(search: PartitionSearch) -> Partition | None:
    """The best partition; None if none fits or exists."""
    if search.straight:
        # `straight`: one device a stage, exact. First without memory, which is faster and mostly enough.
        straight = _best_straight(search, Straight(space=search.space))
        if straight is None or search.memory is None or fits(search, straight):
            return straight
        return _best_straight(search, Straight(space=search.space, memory=search.memory))

    # `recurrence`: without memory, exact; memory is checked afterwards.
    level = LevelSearch(search.space, search.outermost, fewer=search.fewer)
    optimum = level.optimum(0, search.space.last)
    found = made(search, _parts(level, 0, search.space.last), optimum.cost_s, _proof(search, level))
    if search.memory is None or fits(search, found):
        return found
    has_messages = search.memory.law.buffers is not None
    if search.outermost == 0 and (recurrence := _exact(search, has_messages=has_messages)) is not None:
        # `memory_recurrence`: memory decides on one level of few devices, exact.
        return _of_recurrence(search, recurrence)
    return _with_room(search, level, optimum)


def least_s(search: PartitionSearch) -> float:
    """The time of the best partition without memory limits; 0 if none exists. No stages are chosen or proven."""
    if search.straight:
        straight = _best_straight(search, Straight(space=search.space))
        return 0.0 if straight is None else straight.cost_s
    return LevelSearch(search.space, search.outermost, fewer=search.fewer).optimum(0, search.space.last).cost_s


def _parts(level: LevelSearch, start: int, stop: int) -> tuple[LevelPart, ...]:
    """The preferred stages of a level, and inside each those of the level within."""
    return tuple(
        LevelPart(start=a, stop=b, units=m, inside=() if level.inner is None else _parts(level.inner, a, b))
        for a, b, m in _preferred(level, start, stop)
    )


def _preferred(level: LevelSearch, start: int, stop: int) -> Stages:
    """The stages of the optimum from one state to another that the rule for ties prefers (`from_end`).

    Where the rule's table has more than `tied_entries`: those that the search found.
    """
    everything = (start, stop, level.units)
    limit_s = level.optimum(start, stop).cost_s * (1 + 2 * ROUNDING)
    if not level.fewer and level.stage_s(*everything) <= limit_s:
        return (everything,)
    within_s = level.optimum(start, stop).cost_s or level.stage_s(*everything) * NOTHING
    states = level.states(level.space.within(start, stop), within_s)
    needs = level.needs(within_s, start, stop)
    while True:
        # by the bounds known so far; if a stage turns out slower, its time is known in the next round
        table = least_units(needs, states, level.units)
        on_a_path = table.least + units_before(needs, states) <= level.units
        states, units = states[on_a_path], int(table.least[0]) if level.fewer else level.units
        if (len(states) * units) ** 2 > BUDGET.tied_entries:
            return level.optimum(start, stop).stages
        need, several = needs.block(states, states)
        pipelines = FromEnd(units=units, start=0, stop=len(states) - 1)
        found = fewest_sent(
            pipelines,
            level.space,
            states,
            within=partial(_enough, need, several),
            cuts_within=np.ones(len(states), dtype=bool),
            total=units,
        )
        stages = tuple((int(states[a]), int(states[b]), m) for a, b, m in found)
        if all(level.stage_s(*stage) <= max(limit_s, within_s) for stage in stages):
            return stages


def _enough(need: FloatArray, several: FloatArray, units: int, downstream: int) -> BoolArray:
    """By the least units of each stage, and the least of two and more: whether these numbers of units are enough."""
    return np.asarray((need == units) | (several <= units))


def _proof(search: PartitionSearch, level: LevelSearch) -> Proof:
    """The last probe's table, filled up to all states."""
    optimum = level.refutation(0, search.space.last)
    table = optimum.refutation
    if table is None:
        return Proof(method="probe", bound_s=0.0)
    space = search.space
    every = space.within(0, space.last)
    before = units_before(level.needs(optimum.refuted_s, 0, space.last), every)
    rows = []
    for least in [table.least] if table.replicated is None else [table.least, table.replicated]:
        # by original state: the units needed, capped where they exceed the total with the units before the state
        needed, row = np.full(len(space), np.inf), np.zeros(len(space))
        needed[table.states] = least
        row[space.original[every]] = np.minimum(needed[every], level.units + 1 - before)
        rows.append(tuple(row.tolist()))
    return Proof(method="probe", bound_s=optimum.cost_s, refuted_s=optimum.refuted_s, rows=tuple(rows))


def _best_straight(search: PartitionSearch, pipelines: Straight) -> Partition | None:
    """On all devices; on fewer, the least cost and then the fewest stages."""
    unit = search.space.devices_inside(search.outermost)
    depths = range(unit, search.devices + 1, unit) if search.fewer else (search.devices,)
    found = [best for depth in depths if (best := pipelines.optimum(depth)) is not None]
    if not found:
        return None
    cost, stages = min(found, key=lambda best: (best[0], len(best[1])))
    parts = _in_units(search.space, search.outermost, stages)
    return made(search, parts, cost, Proof(method="recurrence", bound_s=cost))


def _in_units(space: PartitionSpace, level: int, stages: Stages) -> tuple[LevelPart, ...]:
    """Stages of one device each, filled into the units of each level."""
    unit = space.devices_inside(level)
    groups = [stages[first : first + unit] for first in range(0, len(stages), unit)]
    return tuple(
        LevelPart(
            start=group[0][0],
            stop=group[-1][1],
            units=1,
            inside=() if level == 0 else _in_units(space, level - 1, group),
        )
        for group in groups
    )


def _exact(search: PartitionSearch, *, has_messages: bool = False) -> MemoryRecurrence | None:
    """`memory_recurrence` for the whole search; None if it is not affordable."""
    tables = InnerTables(space=search.space, memory=_memory(search))
    recurrence = MemoryRecurrence(
        tables=tables,
        level=search.outermost,
        units=search.space.levels[-1].units,
        start=0,
        stop=search.space.last,
        has_neighbours=has_messages,
    )
    return recurrence if recurrence.work <= BUDGET.recurrence_entries else None


def _of_recurrence(search: PartitionSearch, recurrence: MemoryRecurrence) -> Partition | None:
    found = recurrence.optimum(fewer=search.fewer)
    if found is None:
        return None
    cost_s, stages = found
    proof = Proof(method="recurrence", bound_s=cost_s)
    return made(search, tuple(_parts_by_recurrence(recurrence, stages)), cost_s, proof)


def _parts_by_recurrence(recurrence: MemoryRecurrence, stages: Stages) -> Iterator[LevelPart]:
    """The stages; inside each those of V^{k-1} with the devices downstream."""
    space, level = recurrence.tables.space, recurrence.level
    downstream = sum(units for _, _, units in stages)
    for start, stop, units in stages:
        downstream -= units
        inside: tuple[LevelPart, ...] = ()
        if level > 0:
            beyond = downstream_each(downstream * space.devices_inside(level) + recurrence.beyond, units)
            units_inside = space.levels[level - 1].units
            inner = replace(recurrence, level=level - 1, units=units_inside, start=start, stop=stop, beyond=beyond)
            found = inner.optimum()
            inside = tuple(_parts_by_recurrence(inner, found[1])) if found else ()
        yield LevelPart(start=start, stop=stop, units=units, inside=inside)


def _fitting(search: PartitionSearch, level: LevelSearch, optimum: Optimum) -> Partition | None:
    """Where memory decides, without messages: `memory_recurrence`, exact, if it is affordable; else `fitting`, whose
    proof may leave a gap.
    """
    memory = _memory(search)
    if DevicesNeeded(memory, search.space, search.devices).stages(memory.law.limit_bytes) is None:
        return None
    recurrence = _exact(search)
    if recurrence is not None:
        return _of_recurrence(search, recurrence)
    if search.outermost > 0:
        # as if every link were the slowest: the plan is possible, and no slower than predicted
        flat = partition(search.on_one_level)
        return None if flat is None else replace(flat, proof=_proof(search, level))
    found = FittingSearch(level, memory).search(smallest(memory, search.space, search.devices), optimum.refuted_s)
    return made(search, _flat(found.stages), found.cost_s, Proof(method="fewest that fit", bound_s=found.refuted_s))


def _with_room(search: PartitionSearch, level: LevelSearch, optimum: Optimum) -> Partition | None:
    """Stages that fit with their messages, by searches without messages: each reserves more memory for them. The proof
    may leave a gap.
    """
    memory, reserved_bytes = _memory(search), 0.0
    first = found = _fitting(search, level, optimum)
    while found is not None and not fits(search, found):
        # enough to rule out one of the stages that do not fit, for any neighbours
        limit = memory.law.limit_bytes
        ruled_out = min(
            limit - alone for alone, messages in held_bytes_apart(search, found) if alone + messages > limit
        )
        reserved_bytes = max(ruled_out + 1, BUDGET.reserved_growth * reserved_bytes)
        law = replace(memory.law, limit_bytes=limit - reserved_bytes)
        found = _fitting(replace(search, memory=replace(memory, law=law)), level, optimum)
    if first is None or found is first:
        return found

    # the best stages as if all links were the slowest, with messages; or those that hold the least
    others = None
    if search.outermost > 0 and (recurrence := _exact(search.on_one_level, has_messages=True)) is not None:
        others = _of_recurrence(search.on_one_level, recurrence)
    others = priced(search, (others or nearest(search)[0]).parts)
    fitting = [each for each in (found, others) if each is not None and fits(search, each)]
    if not fitting:
        return None
    proof = first.proof
    if proof.method == "recurrence":
        proof = replace(proof, method="recurrence without messages")
    return replace(min(fitting, key=lambda each: each.cost_s), proof=proof)


def _memory(search: PartitionSearch) -> Memory:
    if search.memory is None:
        raise ValueError("a search without memory has no stages that do not fit")
    return search.memory


def nearest(search: PartitionSearch) -> tuple[Partition, int, float]:
    """The partition whose worst stage holds the least, that stage and its bytes: the nearest miss if none fits.

    To the byte without messages, or where the pipeline is straight; else to `nearest_precision`, or on many devices the
    better of two kinds of pipelines.
    """
    memory, flat = _memory(search), search.on_one_level
    found = None
    if search.straight:
        found = _best_straight(search, Straight(space=search.space, memory=memory, of_bytes=True))
    if found is None:
        unproven = Proof(method="none", bound_s=0.0)
        fewest = made(flat, _flat(smallest(memory, flat.space, search.devices)), 0.0, unproven)
        found = min(fewest, data_parallel(flat), key=lambda each: max(held_bytes(flat, each)))
        low = max(alone for alone, _ in held_bytes_apart(flat, fewest))
        while (high := max(held_bytes(flat, found))) > low * (1 + BUDGET.nearest_precision):
            law = replace(memory.law, limit_bytes=(low + high) / 2)
            recurrence = _exact(replace(flat, memory=replace(memory, law=law)), has_messages=True)
            if recurrence is None:
                break
            less = _of_recurrence(flat, recurrence)
            found, low = (found, law.limit_bytes) if less is None else (less, low)
    found = replace(found, cost_s=0.0, proof=Proof(method="recurrence", bound_s=0.0))
    held = held_bytes(search, found)
    return found, held.index(max(held)), max(held)


def _flat(stages: Stages) -> tuple[LevelPart, ...]:
    """The stages as parts of a single level."""
    return tuple(LevelPart(start=start, stop=stop, units=units) for start, stop, units in stages)
