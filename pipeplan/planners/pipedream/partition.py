"""Partition: states on the levels of a network -> the stages that make the slowest of them fastest.

One level is PipeDream (2018, section 3.2), several are its later form (SOSP 2019, section 3.1), inside out: what a
server makes of a part of the model is the unit of the level around it (`space` has the formulas). The search
is exact: `level` without memory, `recurrence` and `memory` where memory decides,
`straight` for one device a stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.pipedream.fitting import FittingSearch, Law, Memory, in_flight, memory_of, smallest
from pipeplan.planners.pipedream.memory_recurrence import MemoryProblem, Recurrence, behind_each
from pipeplan.planners.pipedream.probe import Stages, units_before
from pipeplan.planners.pipedream.recurrence import LevelSearch, Optimum
from pipeplan.planners.pipedream.space import LevelLinks, PartitionSpace, space_of
from pipeplan.planners.pipedream.states import States
from pipeplan.planners.pipedream.straight import Straight
from pipeplan.planners.pipedream.ties import preferred

RECURRENCE_ENTRIES = 3e8
"""What the recurrence may compare: a few seconds. Beyond, memory is met by a search that may leave a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPart:
    """Blocks between two states on so many units of a level, each laid out as the parts inside say."""

    start: int
    stop: int
    units: int
    inside: tuple["LevelPart", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShare:
    """A stage: from state to state on so many replicas, and what it takes a minibatch: the slowest of its levels."""

    start: int
    stop: int
    replicas: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Why nothing is better: no plan is below `bound_s`.

    Even were memory no matter (`probe`); as every plan was compared (`recurrence`); or as what fits would need more
    devices than there are (`fewest that fit`).

    `rows` are of the bottleneck `refuted_s`: by state, how many units of the outermost level are needed at least from
    there to the end; of the first state more than there are. A second row says the same of plans of which at least
    one stage has two units or more; then the first only counts for it.
    """

    method: str
    bound_s: float
    refuted_s: float = 0.0
    rows: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in order, the slowest part of the pipeline, and (stage, replica) by device."""

    shares: tuple[LevelShare, ...]
    cost_s: float
    placement: tuple[tuple[int, int], ...]
    proof: Proof

    @property
    def replicas(self) -> list[int]:
        """By stage."""
        return [share.replicas for share in self.shares]


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionSearch:
    """What is searched: on all units of the outermost level, or `fewer`; one device a stage, or any."""

    space: PartitionSpace
    memory: Memory | None = None
    straight: bool = False
    fewer: bool = False

    @property
    def devices(self) -> int:
        """All."""
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
    """The search for these states. Levels of one unit join nothing and are left out, but for the last."""
    joining = [links for links in levels if links.units > 1] or [levels[-1]]
    space = space_of(states, tuple(joining), exchange)
    memory = None if law is None else memory_of(states, space, law)
    return PartitionSearch(space=space, memory=memory, straight=straight, fewer=fewer)


def partition(search: PartitionSearch) -> Partition | None:
    """The best partition; None where none fits, or none exists."""
    if search.straight:
        return _straight(search)
    level = LevelSearch(search.space, search.outermost, fewer=search.fewer)
    optimum = level.optimum(0, search.space.last)
    found = _partition(search, _parts(level, 0, search.space.last), optimum.cost_s, _proof(search, level))
    if search.memory is None or fits(search, found):
        return found
    return _fitting(search, level, optimum)


def fits(search: PartitionSearch, found: Partition) -> bool:
    """Whether every stage fits its device."""
    limit = np.inf if search.memory is None else search.memory.law.limit_bytes
    return max(held_bytes(search, found)) <= limit


def held_bytes(search: PartitionSearch, found: Partition) -> list[float]:
    """What a worker of each stage holds."""
    memory, index = search.memory, {int(state): i for i, state in enumerate(search.space.original)}
    if memory is None:
        return [0.0 for _ in found.shares]
    return [
        float(memory.held_bytes(np.array([index[share.start]]), np.array([index[share.stop]]), held)[0, 0])
        for share, held in zip(found.shares, in_flight(found.replicas), strict=True)
    ]


def _parts(level: LevelSearch, start: int, stop: int) -> tuple[LevelPart, ...]:
    return tuple(
        LevelPart(start=a, stop=b, units=m, inside=() if level.inner is None else _parts(level.inner, a, b))
        for a, b, m in preferred(level, start, stop)
    )


def _proof(search: PartitionSearch, level: LevelSearch) -> Proof:
    optimum = level.refutation(0, search.space.last)
    table = optimum.refutation
    if table is None:
        return Proof(method="probe", bound_s=0.0)
    space = search.space
    every = space.within(0, space.last)
    before = units_before(level.needs(optimum.refuted_s, 0, space.last), every)
    rows = [table.least] if table.replicated is None else [table.least, table.replicated]
    return Proof(
        method="probe",
        bound_s=optimum.cost_s,
        refuted_s=optimum.refuted_s,
        rows=tuple(_row(space, every, level.units + 1 - before, table.states, row) for row in rows),
    )


def _row(
    space: PartitionSpace, every: IntArray, enough: FloatArray, states: IntArray, least: FloatArray
) -> tuple[float, ...]:
    """By state as given: what is needed, but no more than is too much with what lies before."""
    needed, row = np.full(len(space), np.inf), np.zeros(len(space))
    needed[states] = least
    row[space.original[every]] = np.minimum(needed[every], enough)
    return tuple(row.tolist())


def _straight(search: PartitionSearch) -> Partition | None:
    """The best; first as if memory were no matter, which is quicker and mostly enough."""
    best = _best_straight(search, Straight(space=search.space))
    found = None if best is None else _of_straight(search, best)
    if found is None or search.memory is None or fits(search, found):
        return found
    best = _best_straight(search, Straight(space=search.space, memory=search.memory))
    return None if best is None else _of_straight(search, best)


def _of_straight(search: PartitionSearch, best: tuple[float, Stages]) -> Partition:
    parts = _in_units(search.space, search.outermost, best[1])
    return _partition(search, parts, best[0], Proof(method="recurrence", bound_s=best[0]))


def _best_straight(search: PartitionSearch, pipelines: Straight) -> tuple[float, Stages] | None:
    """On all devices; on fewer, the least cost and then the fewest stages."""
    unit = search.space.devices_inside(search.outermost)
    depths = range(unit, search.devices + 1, unit) if search.fewer else (search.devices,)
    found = [best for depth in depths if (best := pipelines.optimum(depth)) is not None]
    return min(found, key=lambda best: (best[0], len(best[1])), default=None)


def _in_units(space: PartitionSpace, level: int, stages: Stages) -> tuple[LevelPart, ...]:
    """Straight stages, filled into the units of each level."""
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
    tables = Recurrence(space=search.space, memory=memory)
    if tables.work() <= RECURRENCE_ENTRIES:
        return _by_recurrence(search, tables)
    most_bytes, stages = smallest(memory, search.space, search.devices)
    if most_bytes > memory.law.limit_bytes:
        return None
    if search.outermost > 0:
        return _on_one_level(search, level)
    found = FittingSearch(level, memory).search(stages, optimum.refuted_s)
    parts = tuple(LevelPart(start=a, stop=b, units=m) for a, b, m in found.stages)
    return _partition(search, parts, found.cost_s, Proof(method="fewest that fit", bound_s=found.refuted_s))


def _memory(search: PartitionSearch) -> Memory:
    if search.memory is None:
        raise ValueError("a search without memory has no stages that do not fit")
    return search.memory


def _on_one_level(search: PartitionSearch, level: LevelSearch) -> Partition | None:
    """As if every link were the slowest: a plan that is possible, and no faster than it says."""
    found = partition(replace(search, space=replace(search.space, levels=_one_level(search.space))))
    return None if found is None else replace(found, proof=_proof(search, level))


def nearest(search: PartitionSearch) -> tuple[Partition, int, float]:
    """The partition whose worst stage holds the least, that stage and its bytes: the nearest miss where none fits."""
    memory = _memory(search)
    tables = Recurrence(space=search.space, memory=memory, of_bytes=True)
    straight = None
    if search.straight:
        straight = _best_straight(search, Straight(space=search.space, memory=memory, of_bytes=True))
    if straight is not None:
        parts = _in_units(search.space, search.outermost, straight[1])
    elif search.outermost > 0 and tables.work() <= RECURRENCE_ENTRIES:
        problem = MemoryProblem(tables=tables, level=search.outermost, start=0, stop=search.space.last, beyond=0)
        units = search.space.levels[-1].units
        parts = _parts_by_recurrence(problem, units, float(problem.optimum_s(units)[units, 0]))
    else:
        search = replace(search, space=replace(search.space, levels=_one_level(search.space)))
        stages = smallest(memory, search.space, search.devices)[1]
        parts = tuple(LevelPart(start=a, stop=b, units=m) for a, b, m in stages)
    found = _partition(search, parts, 0.0, Proof(method="recurrence", bound_s=0.0))
    held = held_bytes(search, found)
    return found, held.index(max(held)), max(held)


def data_parallel(search: PartitionSearch) -> Partition:
    """Everything on every device."""
    parts: tuple[LevelPart, ...] = ()
    for links in search.space.levels:
        parts = (LevelPart(start=0, stop=search.space.last, units=links.units, inside=parts),)
    shares = _shares(search.space, search.outermost, parts, 1, 0.0)
    return _partition(search, parts, max(share.time_s for share in shares), Proof(method="none", bound_s=0.0))


def _one_level(space: PartitionSpace) -> tuple[LevelLinks, ...]:
    """All devices behind the slowest links."""
    slowest = min(links.bandwidth_bytes_per_s for links in space.levels)
    return (LevelLinks(units=space.devices_inside(len(space.levels)), bandwidth_bytes_per_s=slowest),)


def _by_recurrence(search: PartitionSearch, tables: Recurrence) -> Partition | None:
    problem = MemoryProblem(tables=tables, level=search.outermost, start=0, stop=search.space.last, beyond=0)
    units = search.space.levels[-1].units
    values = problem.optimum_s(units)[:, 0]
    used = int(np.argmin(values)) if search.fewer else units
    cost_s = float(values[used])
    if not np.isfinite(cost_s):
        return None
    parts = _parts_by_recurrence(problem, used, cost_s)
    return _partition(search, parts, cost_s, Proof(method="recurrence", bound_s=cost_s))


def _parts_by_recurrence(problem: MemoryProblem, units: int, cost_s: float) -> tuple[LevelPart, ...]:
    space, parts, behind = problem.tables.space, [], units
    for start, stop, taken in problem.preferred(units, cost_s):
        behind -= taken
        inside: tuple[LevelPart, ...] = ()
        if problem.level > 0:
            beyond = behind_each(behind * space.devices_inside(problem.level) + problem.beyond, taken)
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
    )


def _shares(
    space: PartitionSpace, level: int, parts: Sequence[LevelPart], copies: int, around_s: float
) -> Iterator[LevelShare]:
    """The stages in order; `copies` of all this are there, and what is around it takes `around_s` a minibatch."""
    for part in parts:
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
    """(stage, replica) by device. Replica k of a part's stage sits on unit k mod units: a minibatch stays in a unit."""
    placed = []
    for part in parts:
        inside = placement_of(part.inside, numbers) if part.inside else [(next(numbers), 0)]
        placed += [(stage, replica * part.units + unit) for unit in range(part.units) for stage, replica in inside]
    return placed
