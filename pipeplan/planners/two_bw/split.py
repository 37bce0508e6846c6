"""Split: n blocks into exactly d contiguous stages, where a stage's cost depends on which stage it is.

Suffixes are folded from the last stage on; the walk from the front takes the first best stop, hence the
lexicographically smallest cuts. O(d (n - d + 1)^2) time where every start is looked at.

Few are. A stage costs at least the work of its blocks, which adds up: if no stage may cost more than a limit, stage s
starts where s stages of at most so much work reach to, and where the others reach back to from the end. The search for
the least largest cost raises the limit until what it finds is within it: no split outside can then be as good. For the
least sum of squares, the limit is on the sum, and what is before a stage is near its even share.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np

from pipeplan.arrays import FloatArray

ROUNDING = 1e-9
"""By how much sums in different orders may differ: a bound is trusted no further."""

NEAR = 1 / 64
"""How near the limit of a search is brought to the least that leaves any starts."""

HALVINGS = 12
"""How often at most the gap is halved for that."""

Costs = Callable[[int, slice, slice], FloatArray]
"""For a stage, its costs as (starts, stops): of the blocks [i, j), i and j of the two ranges; infinite if it may
not be."""

Way = Sequence[tuple[Sequence[float], float]]
"""Sums over the blocks [0, i) for every i up to n, and how much of each a stage may have."""

Limits = Callable[[float], Sequence[Sequence[Way]]]
"""For a limit on their cost, the ways in which every stage may keep it: a stage beyond all of its ways costs more."""

Starts = tuple[slice, ...]
"""Where every stage may start, and as a last element the end of the blocks."""


def every_start(blocks: int, depth: int) -> Starts:
    """All that leave a block for every stage."""
    spare = blocks - depth + 1
    return (slice(0, 1), *(slice(stage, stage + spare) for stage in range(1, depth)), slice(blocks, blocks + 1))


def starts_within(limits: Limits, limit: float, among: Starts) -> Starts | None:
    """Where the stages may start if none may cost more than the limit; None if there is no such split."""
    every = limits(limit)
    highest = _highest(every, among)
    if highest is None:
        return None
    lowest = [among[-1].start]
    for ways, may, high in zip(reversed(every), reversed(among[:-1]), reversed(highest[:-1]), strict=True):
        reach = _nearest(ways, lowest[-1])
        if reach > high:
            return None
        lowest.append(max(reach, may.start))
    lowest.reverse()
    return tuple([slice(low, high + 1) for low, high in zip(lowest, highest, strict=True)])


def is_within(limits: Limits, limit: float, among: Starts) -> bool:
    """Whether there is such a split: the one whose stages are all as long as can be will do."""
    return _highest(limits(limit), among) is not None


def _highest(every: Sequence[Sequence[Way]], among: Starts) -> list[int] | None:
    highest = [0]
    for ways, may in zip(every, among[1:], strict=True):
        reach = _farthest(ways, highest[-1])
        if reach < may.start:
            return None
        highest.append(min(reach, may.stop - 1))
    return highest


def _farthest(ways: Sequence[Way], start: int) -> int:
    """Where a stage that starts here ends at last, in the best of its ways."""
    best = 0
    for way in ways:
        reach = len(way[0][0])
        for sums, most in way:
            reach = min(reach, bisect_right(sums, sums[start] + most))
        best = max(best, reach)
    return best - 1


def _nearest(ways: Sequence[Way], stop: int) -> int:
    """Where a stage that ends here starts at first, in the best of its ways."""
    best = stop
    for way in ways:
        reach = 0
        for sums, most in way:
            reach = max(reach, bisect_left(sums, sums[stop] - most))
        best = min(best, reach)
    return best


@dataclass(frozen=True, slots=True)
class Found:
    """The largest cost of the split in which it is least, and starts among which are those of all such splits."""

    worst: float
    starts: Starts


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSearch:
    """What is split: the stages' costs, what limits them, where stages may start, and what the largest cost is about.

    `costs` makes the costs among some starts. `about` is no more than the least largest cost: costs below it may be
    given as anything below it. With a `breadth` only so many starts of each stage are looked at, the last ones that a
    limit leaves: where costs grow with a stage's blocks, later starts are never worse, and a split that is good is
    found; only the limits are exact then.
    """

    costs: Callable[[Starts, float], Costs]
    limits: Limits
    starts: Starts
    about: float
    breadth: int | None = None

    def least_max(self, ceiling: float = inf) -> Found | None:
        """The least largest cost; None if there is no split, or none at or below the ceiling.

        The limit is brought near to the least one that leaves any starts. What is found among those is reached by a
        split, so that the least largest cost is among the starts that it leaves.
        """
        limit = self._least_limit(ceiling)
        while limit is not None:
            starts = self._within(limit)
            if starts is None:
                return None
            worst = max(_fold(self.costs(starts, self.about), starts, np.maximum)[0].item(0), self.about)
            if worst <= limit:
                return Found(worst, starts) if isfinite(worst) else None
            limit = min(worst, ceiling) if limit < ceiling else None
        return None

    def _within(self, limit: float) -> Starts | None:
        starts = starts_within(self.limits, limit, self.starts)
        if starts is None or self.breadth is None:
            return starts
        return tuple(slice(max(may.start, may.stop - self.breadth), may.stop) for may in starts)

    def _least_limit(self, ceiling: float) -> float | None:
        """A limit that leaves starts, not much above those that leave none; None if there is none up to the ceiling."""
        if not is_within(self.limits, ceiling, self.starts):
            return None
        low, high = self.about, min(self.about * 2, ceiling)
        while high < ceiling and not is_within(self.limits, high, self.starts):
            low, high = high, min(high * 4, ceiling) if high > 0 else ceiling
        for _ in range(HALVINGS):
            if high > low * (1 + NEAR) and isfinite(high):
                middle = (low + high) / 2
                leaves = is_within(self.limits, middle, self.starts)
                low, high = (low, middle) if leaves else (middle, high)
        return high

    def stops(self, found: Found) -> tuple[int, ...]:
        """The stops of the split found, of several that of the least sum of squares."""
        costs = self.costs(found.starts, 0.0)

        def squares(stage: int, starts: slice, stops: slice) -> FloatArray:
            table = costs(stage, starts, stops)
            return np.where(table <= found.worst * (1 + 1e-12), np.square(table), np.inf)

        return min_sum(squares, found.starts)

    def any_stops(self, found: Found) -> tuple[int, ...]:
        """The stops of one split found: less work where it does not matter which."""
        return _walk(self.costs(found.starts, 0.0), found.starts, np.maximum)


def least_sum(costs: Costs, starts: Starts) -> float:
    """The least sum of a split; infinite if there is no split."""
    return _fold(costs, starts, np.add)[0].item(0)


def min_sum(costs: Costs, starts: Starts) -> tuple[int, ...]:
    """The stops of the split of the least sum. There must be one."""
    return _walk(costs, starts, np.add)


def least_squares(costs: Callable[[Starts], Costs], work: Sequence[float], starts: Starts) -> tuple[int, ...] | None:
    """The stops of the split whose stages' work has the least sum of squares; None if there is no split.

    `costs` makes the squares among some starts, infinite where a stage may not be. With x before stage s, the squares
    come to at least x^2 / s + (T - x)^2 / (d - s): for a sum of at most T^2 / d + u, x is within
    sqrt(u s (d - s) / d) of s T / d.
    """
    depth, total = len(starts) - 1, work[-1]
    excess = (total / depth) ** 2 / depth
    while True:
        near = _near_even(work, excess, starts)
        if near is not None:
            sum_of_squares = least_sum(costs(near), near)
            if sum_of_squares <= total**2 / depth + excess or near == starts:
                return min_sum(costs(near), near) if isfinite(sum_of_squares) else None
        excess *= 8


def _near_even(work: Sequence[float], excess: float, among: Starts) -> Starts | None:
    depth, total = len(among) - 1, work[-1]
    starts = []
    for stage, may in enumerate(among):
        even = stage * total / depth
        reach = sqrt(excess * stage * (depth - stage) / depth) + ROUNDING * total
        low = max(bisect_left(work, even - reach), may.start)
        high = min(bisect_right(work, even + reach), may.stop)
        if stage in (0, depth):
            low, high = may.start, may.stop
        if low >= high:
            return None
        starts.append(slice(low, high))
    return tuple(starts)


def _walk(costs: Costs, starts: Starts, combine: np.ufunc) -> tuple[int, ...]:
    """The stops of the best split, the first best from the front."""
    suffixes = _fold(costs, starts, combine)
    stops = [0]
    for stage in range(len(starts) - 1):
        here = slice(stops[-1], stops[-1] + 1)
        best = np.argmin(combine(costs(stage, here, starts[stage + 1])[0], suffixes[stage + 1]))
        stops.append(starts[stage + 1].start + int(best))
    return tuple(stops[1:])


def _fold(costs: Costs, starts: Starts, combine: np.ufunc) -> list[FloatArray]:
    """The best cost of stages s.. by the start of stage s, for every s; behind the last stage nothing."""
    suffixes = [np.zeros(1)]
    for stage in reversed(range(len(starts) - 1)):
        table = costs(stage, starts[stage], starts[stage + 1])
        suffixes.append(np.minimum.reduce(combine(table, suffixes[-1]), axis=1))
    return suffixes[::-1]
