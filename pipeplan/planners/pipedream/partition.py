"""Partition: PipeDream's partitioning: states on the levels of a network -> the stages whose slowest is the fastest.

It is A(N, M) of PipeDream's recurrence (2018, section 3.2), with the stages that reach it. On several levels it is the
later form (SOSP 2019, section 3.1), inside out: a server's pipeline for a part of the model is the unit of the level
around it. `space` has the formulas and numbers their steps. The recurrence is solved in one of four ways:

    recurrence          without memory, exactly; memory is checked afterwards
    memory_recurrence   where memory decides, exactly
    fitting             where memory decides and `memory_recurrence` would take too long; the proof may leave a gap
    straight            one device a stage, exactly

Where we differ: stages must fit their devices, a stated rule chooses among equal optima (`ties`), and a proof comes
with the answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from pipeplan.planners.pipedream.fitting import FittingSearch, Law, Memory, fits_any, in_flight, memory_of, smallest
from pipeplan.planners.pipedream.memory_recurrence import MemoryProblem, Recurrence, downstream_each
from pipeplan.planners.pipedream.probe import Stages, units_before
from pipeplan.planners.pipedream.recurrence import LevelSearch, Optimum
from pipeplan.planners.pipedream.space import LevelLinks, PartitionSpace, space_of
from pipeplan.planners.pipedream.states import States
from pipeplan.planners.pipedream.straight import Straight
from pipeplan.planners.pipedream.ties import preferred

RECURRENCE_ENTRIES = 3e8
"""Entries that the recurrence with memory may compare: a few seconds. Beyond, a search may leave a gap."""

RAISED = 1.5
"""How much the limit on the bottleneck is raised where nothing that fits is within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPart:
    """Blocks between two states on so many units of a level; `inside` says how each unit lays them out."""

    start: int
    stop: int
    units: int
    inside: tuple["LevelPart", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShare:
    """A stage: from state to state on so many replicas. `time_s` a minibatch is that of the slowest of its levels."""

    start: int
    stop: int
    replicas: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Why nothing is better: no plan is below `bound_s`.

    `method` is `probe` (no plan is, even without limits of memory), `recurrence` (every plan was compared) or
    `fewest that fit` (plans that fit need more devices than there are).

    `rows` prove that no plan has the bottleneck `refuted_s`. A row gives, by state, the least units of the outermost
    level that the rest of the model needs; from the first state that is more than there are. A second row counts only
    plans with a stage on two units or more. The first row then only supports it.
    """

    method: str
    bound_s: float
    refuted_s: float = 0.0
    rows: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in order, the time of the slowest part of the pipeline, and (stage, replica) by device.

    `parts` are the same stages by level.
    """

    shares: tuple[LevelShare, ...]
    cost_s: float
    placement: tuple[tuple[int, int], ...]
    proof: Proof
    parts: tuple[LevelPart, ...]

    @property
    def replicas(self) -> list[int]:
        """The number of replicas, by stage."""
        return [share.replicas for share in self.shares]


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionSearch:
    """What is searched: all units of the outermost level, or `fewer`; `straight`, one device a stage, or any number."""

    space: PartitionSpace
    memory: Memory | None = None
    straight: bool = False
    fewer: bool = False

    @property
    def devices(self) -> int:
        """The number of all devices."""
        return self.space.devices_inside(len(self.space.levels))

    @property
    def outermost(self) -> int:
        return len(self.space.levels) - 1


def search_of(
    states: States,
    levels: Sequence[LevelLinks],
    *,
    exchange: float = 4.0,
    law: Law | None = None,
    straight: bool = False,
    fewer: bool = False,
) -> PartitionSearch:
    """The search for these states, without levels of one unit, which join nothing; one level is always left."""
    joining = [links for links in levels if links.units > 1] or [levels[-1]]
    space = space_of(states, tuple(joining), exchange)
    memory = None if law is None else memory_of(states, space, law)
    return PartitionSearch(space=space, memory=memory, straight=straight, fewer=fewer)


def partition(search: PartitionSearch) -> Partition | None:
    """The best partition; None if none fits, or none exists."""
    if search.straight:
        # first without memory, which is quicker and mostly enough
        straight = _best_straight(search, Straight(space=search.space))
        if straight is None or search.memory is None or fits(search, straight):
            return straight
        return _best_straight(search, Straight(space=search.space, memory=search.memory))

    level = LevelSearch(search.space, search.outermost, fewer=search.fewer)
    optimum = level.optimum(0, search.space.last)
    found = _partition(search, _parts(level, 0, search.space.last), optimum.cost_s, _proof(search, level))
    if search.memory is None or fits(search, found):
        return found
    return _fitting(search, level, optimum)


def least_s(search: PartitionSearch) -> float:
    """The time of the best partition without limits of memory; 0 if none exists. No stages are chosen or proven."""
    if search.straight:
        straight = _best_straight(search, Straight(space=search.space))
        return 0.0 if straight is None else straight.cost_s
    return LevelSearch(search.space, search.outermost, fewer=search.fewer).optimum(0, search.space.last).cost_s


def fits(search: PartitionSearch, found: Partition) -> bool:
    """Whether every stage fits its device."""
    limit = np.inf if search.memory is None else search.memory.law.limit_bytes
    return max(held_bytes(search, found)) <= limit


def held_bytes(search: PartitionSearch, found: Partition) -> list[float]:
    """The bytes that a worker of each stage holds."""
    memory, index = search.memory, {int(state): i for i, state in enumerate(search.space.original)}
    if memory is None:
        return [0.0 for _ in found.shares]
    return [
        float(memory.held_bytes(np.array([index[share.start]]), np.array([index[share.stop]]), held)[0, 0])
        for share, held in zip(found.shares, in_flight(found.replicas), strict=True)
    ]


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
        # by state as given: what is needed, but no more than is too much with what lies before
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
    return _partition(search, parts, cost, Proof(method="recurrence", bound_s=cost))


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
    """Memory decides: by the recurrence if that is affordable, else by a search whose proof may leave a gap."""
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
        return _partition(search, parts, cost_s, Proof(method="recurrence", bound_s=cost_s))

    if search.outermost > 0:
        # as if every link were the slowest: the plan is possible, and no slower than it says
        one_level = partition(replace(search, space=replace(search.space, levels=_one_level(search.space))))
        return None if one_level is None else replace(one_level, proof=_proof(search, level))
    stages = smallest(memory, search.space, search.devices)[1]
    found = FittingSearch(level, memory).search(stages, optimum.refuted_s)
    parts = tuple(LevelPart(start=a, stop=b, units=m) for a, b, m in found.stages)
    return _partition(search, parts, found.cost_s, Proof(method="fewest that fit", bound_s=found.refuted_s))


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
    """The partition whose worst stage holds the least, that stage and its bytes: the nearest miss if none fits."""
    memory = _memory(search)
    tables = Recurrence(space=search.space, memory=memory, of_bytes=True)
    unproven = Proof(method="recurrence", bound_s=0.0)
    found = None
    if search.straight:
        found = _best_straight(search, Straight(space=search.space, memory=memory, of_bytes=True))
    if found is not None:
        found = replace(found, cost_s=0.0, proof=unproven)
    elif search.outermost > 0 and tables.work() <= RECURRENCE_ENTRIES:
        problem = MemoryProblem(tables=tables, level=search.outermost, start=0, stop=search.space.last, beyond=0)
        units = search.space.levels[-1].units
        parts = _parts_by_recurrence(problem, units, float(problem.optimum_s(units)[units, 0]))
        found = _partition(search, parts, 0.0, unproven)
    else:
        search = replace(search, space=replace(search.space, levels=_one_level(search.space)))
        stages = smallest(memory, search.space, search.devices)[1]
        parts = tuple(LevelPart(start=a, stop=b, units=m) for a, b, m in stages)
        found = _partition(search, parts, 0.0, unproven)
    held = held_bytes(search, found)
    return found, held.index(max(held)), max(held)


def data_parallel(search: PartitionSearch) -> Partition:
    """Everything on every device."""
    parts: tuple[LevelPart, ...] = ()
    for links in search.space.levels:
        parts = (LevelPart(start=0, stop=search.space.last, units=links.units, inside=parts),)
    shares = _shares(search.space, search.outermost, parts, 1, 0.0)
    return _partition(search, parts, max(share.time_s for share in shares), Proof(method="none", bound_s=0.0))


def priced(search: PartitionSearch, parts: tuple[LevelPart, ...]) -> Partition:
    """These stages on the search's network, whichever network they were found for; nothing is proven about them."""
    if search.outermost > 0 and not parts[0].inside:  # found as if there were one level
        search = replace(search, space=replace(search.space, levels=_one_level(search.space)))
    found = _partition(search, parts, 0.0, Proof(method="none", bound_s=0.0))
    stages_s = (share.time_s for share in found.shares)
    return replace(found, cost_s=max(*stages_s, 0.0, *_boundaries_s(search.space, search.outermost, parts, 1)))


def _boundaries_s(space: PartitionSpace, level: int, parts: Sequence[LevelPart], copies: int) -> Iterator[float]:
    """What the boundaries between these parts take a minibatch, and those inside them: step 4's 2 a / B."""
    for place, part in enumerate(parts):
        if place > 0:
            sent_bytes = 2 * float(space.boundary_bytes[part.start])
            yield sent_bytes / space.levels[level].bandwidth_bytes_per_s / copies
        yield from _boundaries_s(space, level - 1, part.inside, copies * part.units)


def _one_level(space: PartitionSpace) -> tuple[LevelLinks, ...]:
    """All devices, joined by the slowest links."""
    slowest = min(links.bandwidth_bytes_per_s for links in space.levels)
    return (LevelLinks(units=space.devices_inside(len(space.levels)), bandwidth_bytes_per_s=slowest),)


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


def _partition(search: PartitionSearch, parts: tuple[LevelPart, ...], cost_s: float, proof: Proof) -> Partition:
    return Partition(
        shares=tuple(_shares(search.space, search.outermost, parts, 1, 0.0)),
        cost_s=cost_s,
        placement=tuple(placement_of(parts, count())),
        proof=proof,
        parts=parts,
    )


def _shares(
    space: PartitionSpace, level: int, parts: Sequence[LevelPart], copies: int, around_s: float
) -> Iterator[LevelShare]:
    """The stages in order. There are `copies` of these parts, and what is around them takes `around_s` a minibatch."""
    for part in parts:
        # step 2 along one part: the slowest of its levels, each divided by all replicas
        weight_bytes = space.weight_bytes[part.stop] - space.weight_bytes[part.start]
        replicas = copies * part.units
        exchange_s = float(space.exchange_s(level, weight_bytes, part.units)) / replicas
        slowest_s = max(around_s, exchange_s)
        if part.inside:
            yield from _shares(space, level - 1, part.inside, replicas, slowest_s)
            continue
        compute_s = float(space.compute_s[part.stop] - space.compute_s[part.start]) / replicas
        original = space.original
        yield LevelShare(
            start=int(original[part.start]),
            stop=int(original[part.stop]),
            replicas=replicas,
            time_s=max(slowest_s, compute_s),
        )


def placement_of(parts: Sequence[LevelPart], numbers: Iterator[int]) -> list[tuple[int, int]]:
    """(stage, replica) by device. Replica k of a stage is on unit k mod units, so a minibatch stays in a unit."""
    placed = []
    for part in parts:
        inside = placement_of(part.inside, numbers) if part.inside else [(next(numbers), 0)]
        placed += [(stage, replica * part.units + unit) for unit in range(part.units) for stage, replica in inside]
    return placed
