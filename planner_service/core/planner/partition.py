"""Partition: the best way to lay contiguous stages of blocks on contiguous devices, all of which are used.

The recurrence of PipeDream (2018, section 3.2) from the other end: B(i, p) is the slowest stage of the best pipeline
of the blocks [i, n) on the devices [p, M),

    B(i, p) = min over j, r of max(cost of the stage [i, j) on the devices [p, p + r), B(j, p + r)),    B(n, M) = 0.

From the front or from the end the optimum is one; from the end a stage's first device is known, and with it the links
that it crosses and how many minibatches it has in flight. O(n^2 M^2) time, vectorised over everything but p.

What cannot be part of an optimum is left out: no stage of r replicas is faster than its work / r, so that within a
bound on the cost the blocks before device p hold at most p times the bound of work, and those behind it no more than
their devices can do. The bound comes from the same recurrence on few replica counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from planner_service.core.cost.compute import FloatArray, IntArray

_CHUNK_ENTRIES = 1 << 17
"""Entries of a table that are worked on at once: few enough to stay in a core's cache."""

_ROUNDING = 1e-9
"""By how much sums in different orders may differ: a bound is trusted no further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Stages that start on a device, with these replicas: blocks [i, j + 1) for i and j of the two ranges."""

    first: int
    replicas: IntArray
    starts: slice
    lasts: slice


class Table(Protocol):
    """A (replicas, starts, lasts) array for places; infinite where j < i."""

    def __call__(self, places: Places) -> FloatArray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is laid out: n blocks on M devices, by cost (the largest counts) and by traffic (the sum counts).

    `work` is of every block: a stage's cost is at least its blocks' work / replicas. `counts` are the replicas that a
    stage may have, ascending.
    """

    devices: int
    counts: IntArray
    cost: Table
    traffic: Table
    work: FloatArray

    @property
    def blocks(self) -> int:
        """n."""
        return len(self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Blocks [start, stop) on the devices [first, first + replicas)."""

    start: int
    stop: int
    first: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The stages in order, and the cost of the worst of them."""

    shares: tuple[Share, ...]
    cost: float


def partition(layout: Layout) -> Partition | None:
    """The partition of the smallest largest cost; None where every one costs infinity (or there is none).

    Ties: fewer stages, then less traffic, then the lexicographically smallest cuts, then fewer replicas on the
    earlier stages. First the optimum is found, then the best under this order among all that reach it.
    """
    optimum = _optimum(_Space(layout, _optimum(_Space(_coarse(layout), np.inf))))
    if not np.isfinite(optimum):
        return None
    return Partition(shares=tuple(_walk(_Space(layout, optimum))), cost=optimum)


def _coarse(layout: Layout) -> Layout:
    """The same with the powers of two, and all devices, as replicas: a bound in little time."""
    powers = 2 ** np.arange(layout.devices.bit_length())
    kept = np.intersect1d(layout.counts, np.append(powers, layout.devices))
    return replace(layout, counts=kept)


class _Space:
    """The stages that may be part of a partition within a bound."""

    def __init__(self, layout: Layout, bound: float) -> None:
        self.layout = layout
        self.bound = bound
        before = np.concatenate(([0.0], np.cumsum(layout.work)))
        devices = np.arange(layout.devices + 1)
        self._low = np.zeros(layout.devices + 1, dtype=np.int64)
        self._high = np.full(layout.devices + 1, layout.blocks)
        if np.isfinite(bound):
            can_do = bound * devices * (1 + _ROUNDING)
            self._low = np.searchsorted(before, before[-1] * (1 - _ROUNDING) - can_do[::-1], side="left")
            self._high = np.searchsorted(before, can_do, side="right") - 1

    def places(self, first: int) -> Iterator[Places]:
        """Those that start on a device, in chunks of replicas."""
        starts = slice(int(self._low[first]), min(int(self._high[first]) + 1, self.layout.blocks))
        rows = starts.stop - starts.start
        if rows <= 0:
            return
        counts = self.layout.counts[self.layout.counts <= self.layout.devices - first]
        chunk = max(min(_CHUNK_ENTRIES // (rows * self.layout.blocks), -(-self.layout.devices // 8)), 1)
        for begin in range(0, len(counts), chunk):
            replicas = counts[begin : begin + chunk]
            lasts = slice(
                max(int(self._low[first + replicas[0]]) - 1, starts.start), int(self._high[first + replicas[-1]])
            )
            if lasts.stop > lasts.start:
                yield Places(first=first, replicas=replicas, starts=starts, lasts=lasts)


def _beyond(table: FloatArray, places: Places) -> FloatArray:
    """A table by first device and block, at where the next stage starts: (replicas, 1, lasts)."""
    return table[places.first + places.replicas, None, places.lasts.start + 1 : places.lasts.stop + 1]


def _optimum(space: _Space) -> float:
    """B(0, 0)."""
    layout = space.layout
    worst = np.full((layout.devices + 1, layout.blocks + 1), np.inf)
    worst[layout.devices, layout.blocks] = 0.0
    for first in reversed(range(layout.devices)):
        for places in space.places(first):
            best = np.maximum(layout.cost(places), _beyond(worst, places)).min(axis=(0, 2))
            worst[first, places.starts] = np.minimum(worst[first, places.starts], best)
    return float(worst[0, 0])


def _ranks(space: _Space) -> tuple[FloatArray, FloatArray]:
    """Fewest stages, and among those the least traffic, of the blocks [i, n) on the devices [p, M) as [p, i]."""
    layout = space.layout
    stages = np.full((layout.devices + 1, layout.blocks + 1), np.inf)
    traffic = stages.copy()
    stages[layout.devices, layout.blocks] = traffic[layout.devices, layout.blocks] = 0.0
    for first in reversed(range(layout.devices)):
        for places in space.places(first):
            count, sent = _candidates(space, stages, traffic, places)
            fewest = count.min(axis=(0, 2))
            least = np.where(count == fewest[:, None], sent, np.inf).min(axis=(0, 2))
            _keep_lesser(stages[first, places.starts], traffic[first, places.starts], fewest, least)
    return stages, traffic


def _candidates(
    space: _Space, stages: FloatArray, traffic: FloatArray, places: Places
) -> tuple[FloatArray, FloatArray]:
    """Stages and traffic if a stage within the bound comes first; infinite for others."""
    within = space.layout.cost(places) <= space.bound
    count = np.where(within, 1.0 + _beyond(stages, places), np.inf)
    sent = np.where(within, space.layout.traffic(places) + _beyond(traffic, places), np.inf)
    return count, sent


def _keep_lesser(stages: FloatArray, traffic: FloatArray, count: FloatArray, sent: FloatArray) -> None:
    lesser = (count < stages) | ((count == stages) & (sent < traffic))
    stages[lesser] = count[lesser]
    traffic[lesser] = sent[lesser]


def _walk(space: _Space) -> Iterator[Share]:
    """Reads the partition off the ranks from the front, so that ties go to the smallest next cut."""
    stages, traffic = _ranks(space)
    start = first = 0
    while start < space.layout.blocks:
        choices: list[tuple[int, int]] = []
        for places in space.places(first):
            count, sent = _candidates(space, stages, traffic, places)
            row = start - places.starts.start
            best = (count[:, row] == stages[first, start]) & (sent[:, row] == traffic[first, start])
            choices += [(places.lasts.start + int(last) + 1, int(places.replicas[r])) for r, last in np.argwhere(best)]
        stop, replicas = min(choices)
        yield Share(start=start, stop=stop, first=first, replicas=replicas)
        start, first = stop, first + replicas
