"""Partition: PipeDream's partitioning: states on the levels of a network -> the stages with the least bottleneck.

It is A(N, M) of PipeDream's recurrence (2018, section 3.2), with the stages that reach it. On several levels it is the
later form (SOSP 2019, section 3.1), inside out: a server's pipeline for a part of the model is the unit of the level
around it. `space` has the formulas and numbers their steps. Five solvers share the work; `partition` chooses among
them.

Where we differ: stages must fit their devices, a stated rule chooses among equal optima (`ties`), and a proof comes
with the answer.
"""

from dataclasses import replace

import numpy as np

from pipeplan.planners.pipedream.fitting import FittingSearch, Memory, fits_any, smallest
from pipeplan.planners.pipedream.memory_recurrence import MemoryProblem, Recurrence, downstream_each
from pipeplan.planners.pipedream.message_recurrence import MessageRecurrence
from pipeplan.planners.pipedream.parts import (
    LevelPart,
    Partition,
    PartitionSearch,
    Proof,
    fits,
    held_bytes,
    held_bytes_apart,
    made,
    priced,
)
from pipeplan.planners.pipedream.probe import Stages, units_before
from pipeplan.planners.pipedream.recurrence import LevelSearch, Optimum
from pipeplan.planners.pipedream.space import PartitionSpace
from pipeplan.planners.pipedream.straight import Straight
from pipeplan.planners.pipedream.ties import preferred

RECURRENCE_ENTRIES = 3e8
"""Upper bound on the entries that the recurrence with memory compares: a few seconds. Beyond, a gap may remain."""

RAISED = 1.5
"""The factor by which the limit on the bottleneck grows where no stages that fit are within it."""


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
    if search.outermost == 0:
        # `message_recurrence`: memory decides on one level of few devices, exact.
        recurrence = MessageRecurrence(tables=Recurrence(space=search.space, memory=search.memory))
        if recurrence.work() <= RECURRENCE_ENTRIES:
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
        for a, b, m in preferred(level, start, stop)
    )


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


def _fitting(search: PartitionSearch, level: LevelSearch, optimum: Optimum) -> Partition | None:
    """Where memory decides, without messages: `memory_recurrence`, exact, if it is affordable; else `fitting`, whose
    proof may leave a gap.
    """
    memory = _memory(search)
    if not fits_any(memory, search.space, search.devices):
        return None
    tables = Recurrence(space=search.space, memory=memory)
    if tables.work() <= RECURRENCE_ENTRIES:
        problem = MemoryProblem(tables=tables, level=search.outermost, start=0, stop=search.space.last, beyond=0)
        used, cost_s = _optimum(search, problem, optimum.cost_s)
        if not np.isfinite(cost_s):
            return None
        parts = _parts_by_recurrence(problem, used, cost_s)
        return made(search, parts, cost_s, Proof(method="recurrence", bound_s=cost_s))

    if search.outermost > 0:
        # as if every link were the slowest: the plan is possible, and no slower than predicted
        flat = partition(search.on_one_level)
        return None if flat is None else replace(flat, proof=_proof(search, level))
    stages = smallest(memory, search.space, search.devices)[1]
    found = FittingSearch(level, memory).search(stages, optimum.refuted_s)
    parts = tuple(LevelPart(start=a, stop=b, units=m) for a, b, m in found.stages)
    return made(search, parts, found.cost_s, Proof(method="fewest that fit", bound_s=found.refuted_s))


def _of_recurrence(search: PartitionSearch, recurrence: MessageRecurrence) -> Partition | None:
    found = recurrence.optimum(fewer=search.fewer)
    if found is None:
        return None
    cost, stages = found
    parts = tuple(LevelPart(start=a, stop=b, units=m) for a, b, m in stages)
    return made(search, parts, cost, Proof(method="recurrence", bound_s=cost))


def _with_room(search: PartitionSearch, level: LevelSearch, optimum: Optimum) -> Partition | None:
    """Stages that fit with their messages, by searches without messages: each reserves more memory for them. The proof
    may leave a gap.
    """
    memory, reserved_bytes, smaller = _memory(search), 0.0, search
    first = found = _fitting(search, level, optimum)
    while found is not None and not fits(search, found):
        # enough to rule out one of the stages that do not fit, for any neighbours
        limit = memory.law.limit_bytes
        ruled_out = min(
            limit - alone for alone, messages in held_bytes_apart(search, found) if alone + messages > limit
        )
        reserved_bytes = max(ruled_out + 1, RAISED * reserved_bytes)
        law = replace(memory.law, limit_bytes=limit - reserved_bytes)
        smaller = replace(search, memory=replace(memory, law=law))
        found = _fitting(smaller, level, optimum)
    if first is None or found is first:
        return found
    least = nearest(search)[0]
    others = _on_one_level(search) or priced(search, least.parts)
    fitting = [each for each in (found, others) if each is not None and fits(search, each)]
    if not fitting:
        return None
    proof = first.proof
    if proof.method == "recurrence":
        proof = replace(proof, method="recurrence without messages")
    return replace(min(fitting, key=lambda each: each.cost_s), proof=proof)


def _on_one_level(search: PartitionSearch) -> Partition | None:
    """The best stages as if all links were the slowest, with messages; None if none fit, or this takes too long."""
    flat = search.on_one_level
    recurrence = MessageRecurrence(tables=Recurrence(space=flat.space, memory=_memory(search)))
    if search.outermost == 0 or recurrence.work() > RECURRENCE_ENTRIES:
        return None
    found = _of_recurrence(flat, recurrence)
    return None if found is None else priced(search, found.parts)


def _optimum(search: PartitionSearch, problem: MemoryProblem, least_s: float) -> tuple[int, float]:
    """The units that the best plan uses, and its time, which is `least_s` or more; infinite if none fits."""
    units, space = search.space.levels[-1].units, search.space
    exchange_s = float(space.exchange_s(search.outermost, space.weight_bytes[-1], units))
    longest_s = max(float(space.compute_s[-1]), exchange_s, float(problem.tables.boundaries_s(problem.level).max()))
    limit_s = least_s
    while True:
        limit_s = limit_s * RAISED if 0 < limit_s < longest_s else np.inf
        values = problem.optimum_s(units, limit_s)[:, 0]
        used = int(np.argmin(values)) if search.fewer else units
        if values[used] <= limit_s:
            return used, float(values[used])


def _memory(search: PartitionSearch) -> Memory:
    if search.memory is None:
        raise ValueError("a search without memory has no stages that do not fit")
    return search.memory


def nearest(search: PartitionSearch) -> tuple[Partition, int, float]:
    """The partition whose worst stage holds the least, that stage and its bytes: the nearest miss if none fits.

    Messages are counted, but not in the choice, unless the pipeline is straight.
    """
    memory = _memory(search)
    unproven = Proof(method="recurrence", bound_s=0.0)
    found = None
    if search.straight:
        found = _best_straight(search, Straight(space=search.space, memory=memory, of_bytes=True))
    if found is not None:
        found = replace(found, cost_s=0.0, proof=unproven)
    else:
        search = search.on_one_level
        stages = smallest(memory, search.space, search.devices)[1]
        parts = tuple(LevelPart(start=a, stop=b, units=m) for a, b, m in stages)
        found = made(search, parts, 0.0, unproven)
    held = held_bytes(search, found)
    return found, held.index(max(held)), max(held)


def _parts_by_recurrence(problem: MemoryProblem, units: int, cost_s: float) -> tuple[LevelPart, ...]:
    """The preferred stages within the cost; inside each, those of V^{k-1} with the devices downstream."""
    space, parts, downstream = problem.tables.space, [], units
    for start, stop, taken in problem.preferred(units, cost_s):
        downstream -= taken
        inside: tuple[LevelPart, ...] = ()
        if problem.level > 0:
            beyond = downstream_each(downstream * space.devices_inside(problem.level) + problem.beyond, taken)
            inner = MemoryProblem(tables=problem.tables, level=problem.level - 1, start=start, stop=stop, beyond=beyond)
            everything = space.levels[problem.level - 1].units
            inside = _parts_by_recurrence(inner, everything, float(inner.optimum_s(everything)[everything, start]))
        parts.append(LevelPart(start=start, stop=stop, units=taken, inside=inside))
    return tuple(parts)
