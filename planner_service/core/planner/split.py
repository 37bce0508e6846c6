"""Split: n blocks into exactly d contiguous stages, where a stage's cost depends on which stage it is.

Suffixes are folded from the last stage on; the walk from the front takes the first best stop, hence the
lexicographically smallest cuts. O(d (n - d + 1)^2) time where every start is looked at.

Few are. A stage costs at least the work of its blocks, which adds up: if no stage may cost more than a limit, stage s
starts where s stages of at most so much work reach to, and where the others reach back to from the end. The search for
the least largest cost raises the limit until what it finds is within it: no split outside can then be as good.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner_service.core.cost.compute import FloatArray

ROUNDING = 1e-9
"""By how much sums in different orders may differ: a bound is trusted no further."""

Costs = Callable[[int, slice, slice], FloatArray]
"""For a stage, its costs as (starts, lasts): of the blocks [i, j + 1), i and j of the two ranges; infinite if it may
not be."""

Works = Callable[[int], list[float]]
"""For a stage, the work of the blocks [0, i) for every i up to n: no stage costs less than the work of its blocks."""

Starts = tuple[slice, ...]
"""Where every stage may start, and as a last element the end of the blocks."""


def every_start(blocks: int, depth: int) -> Starts:
    """All that leave a block for every stage."""
    spare = blocks - depth + 1
    return (slice(0, 1), *(slice(stage, stage + spare) for stage in range(1, depth)), slice(blocks, blocks + 1))


def starts_within(works: Works, limit: float, among: Starts) -> Starts | None:
    """Where the stages may start if none may hold more work than the limit; None if there is no such split."""
    most = limit * (1 + ROUNDING)
    highest = [0]
    for stage, may in enumerate(among[1:]):
        sums = works(stage)
        reach = bisect_right(sums, sums[highest[-1]] + most) - 1
        highest.append(min(reach, may.stop - 1))
    lowest = [among[-1].start]
    for stage in reversed(range(len(among) - 1)):
        sums = works(stage)
        reach = bisect_left(sums, sums[lowest[-1]] - most)
        lowest.append(max(reach, among[stage].start))
    lowest.reverse()
    if any(low > high for low, high in zip(lowest, highest, strict=True)):
        return None
    return tuple(slice(low, high + 1) for low, high in zip(lowest, highest, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is split: the stages' costs and work, where stages may start, and what the largest cost is about."""

    costs: Costs
    works: Works
    starts: Starts
    about: float

    def least_max(self) -> float:
        """The largest cost of the split in which it is least; infinite if there is no split."""
        return self._least_max()[0]

    def min_max(self) -> tuple[int, ...] | None:
        """The stops of the split of the least largest cost; among those of the least sum of squares. None without."""
        worst, starts = self._least_max()

        def squares(stage: int, firsts: slice, lasts: slice) -> FloatArray:
            table = self.costs(stage, firsts, lasts)
            return np.where(table <= worst, np.square(table), np.inf)

        return min_sum(squares, starts) if np.isfinite(worst) else None

    def _least_max(self) -> tuple[float, Starts]:
        """The least largest cost, and starts among which are those of all splits that reach it."""
        slack = 0.125
        while True:
            limit = self.about * (1 + slack)
            starts = starts_within(self.works, limit, self.starts)
            worst = np.inf if starts is None else float(_fold(self.costs, starts, np.maximum)[0][0])
            if starts is not None and (worst <= limit or starts == self.starts):
                return worst, starts
            slack *= 4


def least_sum(costs: Costs, starts: Starts) -> float:
    """The least sum of a split; infinite if there is no split."""
    return float(_fold(costs, starts, np.add)[0][0])


def min_sum(costs: Costs, starts: Starts) -> tuple[int, ...] | None:
    """The stops of the split of the least sum; None if there is no split."""
    suffixes = _fold(costs, starts, np.add)
    if not np.isfinite(suffixes[0][0]):
        return None
    stops = [0]
    for stage in range(len(starts) - 1):
        here = slice(stops[-1], stops[-1] + 1)
        best = np.argmin(costs(stage, here, _lasts(starts, stage))[0] + suffixes[stage + 1])
        stops.append(starts[stage + 1].start + int(best))
    return tuple(stops[1:])


def _fold(costs: Costs, starts: Starts, combine: np.ufunc) -> list[FloatArray]:
    """The best cost of stages s.. by the start of stage s, for every s; behind the last stage nothing."""
    suffixes = [np.zeros(1)]
    for stage in reversed(range(len(starts) - 1)):
        table = costs(stage, starts[stage], _lasts(starts, stage))
        suffixes.append(combine(table, suffixes[-1]).min(axis=1))
    return suffixes[::-1]


def _lasts(starts: Starts, stage: int) -> slice:
    """The last blocks of a stage: those before the starts of the next."""
    following = starts[stage + 1]
    return slice(following.start - 1, following.stop - 1)
