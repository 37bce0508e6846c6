"""Parts: PipeDream's stages on the levels of a network, with their times and bytes, and the search's input."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from pipeplan.costs.memory import minibatches_in_flight
from pipeplan.planners.pipedream.fitting import Law, Memory
from pipeplan.planners.pipedream.space import LevelLinks, PartitionSpace, space_of
from pipeplan.planners.pipedream.states import States


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPart:
    """Blocks between two states on `units` units of a level; `inside` has each unit's own parts."""

    start: int
    stop: int
    units: int
    inside: tuple["LevelPart", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShare:
    """A stage: from state to state, with its replicas. `time_s` a minibatch is that of the slowest of its levels."""

    start: int
    stop: int
    replicas: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The proof of a lower bound: no plan is below `bound_s`.

    `method` is `probe` (by a probe, even without memory limits), `recurrence` (every plan was compared), `recurrence
    without messages` (every plan was compared, as if there were no messages) or `fewest that fit` (plans that fit need
    more devices than there are).

    `rows` prove that no plan has the bottleneck `refuted_s`. A row has, by state, the fewest units of the outermost
    level that the rest of the model needs; from the first state these are more than there are. A second row counts only
    plans with a stage on two units or more; the first row then only supports it.
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
    """A search's input: on all units of the outermost level, or on `fewer`; `straight` has one device a stage."""

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

    @property
    def on_one_level(self) -> "PartitionSearch":
        """The same search, with the slowest links between all devices."""
        slowest = min(links.bandwidth_bytes_per_s for links in self.space.levels)
        levels = (LevelLinks(units=self.devices, bandwidth_bytes_per_s=slowest),)
        return replace(self, space=replace(self.space, levels=levels))


def search_of(
    states: States,
    levels: Sequence[LevelLinks],
    *,
    exchange: float = 4.0,
    law: Law | None = None,
    straight: bool = False,
    fewer: bool = False,
) -> PartitionSearch:
    """The search for these states, without levels of one unit, which join nothing; at least one level remains."""
    joining = [links for links in levels if links.units > 1] or [levels[-1]]
    space = space_of(states, tuple(joining), exchange)
    memory = None if law is None else Memory(law=law, states=space.states)
    return PartitionSearch(space=space, memory=memory, straight=straight, fewer=fewer)


def fits(search: PartitionSearch, found: Partition) -> bool:
    """Whether every stage fits its device."""
    limit = np.inf if search.memory is None else search.memory.law.limit_bytes
    return max(held_bytes(search, found)) <= limit


def held_bytes(search: PartitionSearch, found: Partition) -> list[float]:
    """The bytes that a worker of each stage holds."""
    return [alone + messages for alone, messages in held_bytes_apart(search, found)]


def held_bytes_apart(search: PartitionSearch, found: Partition) -> Iterator[tuple[float, float]]:
    """By stage, the bytes that a worker holds by itself, and those of its messages."""
    memory, index = search.memory, {int(state): i for i, state in enumerate(search.space.original)}
    replicas = [0, *found.replicas, 0]
    for place, (share, held) in enumerate(zip(found.shares, minibatches_in_flight(found.replicas), strict=True)):
        if memory is None:
            yield 0.0, 0.0
            continue
        row, column = np.array([index[share.start]]), np.array([index[share.stop]])
        before, own, after = replicas[place : place + 3]
        neighbours = (before, own, after, sum(replicas[place + 2 :]))
        alone = float(memory.held_bytes(row, column, held)[0, 0])
        yield alone, float(memory.message_bytes(row, column, memory.messages(neighbours))[0, 0])


def data_parallel(search: PartitionSearch) -> Partition:
    """The whole model on every device."""
    parts: tuple[LevelPart, ...] = ()
    for links in search.space.levels:
        parts = (LevelPart(start=0, stop=search.space.last, units=links.units, inside=parts),)
    shares = _shares(search.space, search.outermost, parts, 1, 0.0)
    return made(search, parts, max(share.time_s for share in shares), Proof(method="none", bound_s=0.0))


def priced(search: PartitionSearch, parts: tuple[LevelPart, ...]) -> Partition:
    """The stages, found for any network, on the search's network, without a proof."""
    if search.outermost > 0 and not parts[0].inside:  # found on one level
        search = search.on_one_level
    found = made(search, parts, 0.0, Proof(method="none", bound_s=0.0))
    stages_s = (share.time_s for share in found.shares)
    return replace(found, cost_s=max(*stages_s, 0.0, *_boundaries_s(search.space, search.outermost, parts, 1)))


def _boundaries_s(space: PartitionSpace, level: int, parts: Sequence[LevelPart], copies: int) -> Iterator[float]:
    """Seconds a minibatch of the boundaries between these parts, and inside them: step 4's 2 a / B."""
    for place, part in enumerate(parts):
        if place > 0:
            sent_bytes = 2 * float(space.boundary_bytes[part.start])
            yield sent_bytes / space.levels[level].bandwidth_bytes_per_s / copies
        yield from _boundaries_s(space, level - 1, part.inside, copies * part.units)


def made(search: PartitionSearch, parts: tuple[LevelPart, ...], cost_s: float, proof: Proof) -> Partition:
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
    """The stages in order. There are `copies` of these parts; the levels around them take `around_s` a minibatch."""
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
