"""Split: n blocks into exactly d contiguous stages, where a stage's cost depends on which stage it is.

Only starts [s, s + n - d] and stops [s + 1, s + 1 + n - d] are possible for stage s, so every stage's table is a
square of n - d + 1. Suffixes are folded from the last stage on; the walk from the front takes the first best stop,
hence the lexicographically smallest cuts. O(d (n - d + 1)^2) time.
"""

from collections.abc import Callable

import numpy as np

from planner_service.core.cost.compute import FloatArray

Costs = Callable[[int], FloatArray]
"""For a stage, its costs as (n - d + 1, n - d + 1): [a, b] is of the blocks [s + a, s + b + 1); infinite if it may
not be."""


def least_max(costs: Costs, depth: int) -> float:
    """The largest cost of the split in which it is least; infinite if there is no split."""
    return _of_all(_fold(costs, depth, np.maximum))


def least_sum(costs: Costs, depth: int) -> float:
    """The least sum of a split; infinite if there is no split."""
    return _of_all(_fold(costs, depth, np.add))


def min_max(costs: Costs, depth: int) -> tuple[int, ...] | None:
    """The stops of the split of the least largest cost; among those of the least sum of squares. None without one."""
    worst = least_max(costs, depth)

    def squares(stage: int) -> FloatArray:
        table = costs(stage)
        return np.where(table <= worst, np.square(table), np.inf)

    return min_sum(squares, depth) if np.isfinite(worst) else None


def min_sum(costs: Costs, depth: int) -> tuple[int, ...] | None:
    """The stops of the split of the least sum; None if there is no split."""
    suffixes = _fold(costs, depth, np.add)
    if not np.isfinite(_of_all(suffixes)):
        return None
    stops: list[int] = []
    row = 0
    for stage in range(depth - 1):
        row = int(np.argmin(costs(stage)[row] + suffixes[stage + 1]))
        stops.append(stage + row + 1)
    return (*stops, depth + len(suffixes[0]) - 1)


def _fold(costs: Costs, depth: int, combine: np.ufunc) -> list[FloatArray]:
    """The best cost of stages s.. by the start of stage s, for every s."""
    suffixes = [costs(depth - 1)[:, -1]]
    for stage in reversed(range(depth - 1)):
        suffixes.append(combine(costs(stage), suffixes[-1]).min(axis=1))
    return suffixes[::-1]


def _of_all(suffixes: list[FloatArray]) -> float:
    return float(suffixes[0][0])
