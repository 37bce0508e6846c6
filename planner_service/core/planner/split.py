"""Split: n blocks into exactly d contiguous stages, where a stage's cost depends on which stage it is.

Only starts [s, s + n - d] and stops [s + 1, s + 1 + n - d] are possible for stage s, so every stage's table is a
square of n - d + 1. Suffixes are folded from the last stage on; the walk from the front takes the first best stop,
hence the lexicographically smallest cuts. O(d (n - d + 1)^2) time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner_service.core.cost.compute import FloatArray

Costs = Callable[[int], FloatArray]
"""For a stage, its costs as (n - d + 1, n - d + 1): [a, b] is of the blocks [s + a, s + b + 1); infinite if it may
not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where the stages end, and the largest cost or the sum, whichever was asked for."""

    stops: tuple[int, ...]
    cost: float


def min_max(costs: Costs, depth: int) -> Split | None:
    """The split of the least largest cost; among those that of the least sum of squares. None if there is none."""
    worst = _best(_fold(costs, depth, np.maximum))
    if not np.isfinite(worst):
        return None

    def squares(stage: int) -> FloatArray:
        table = costs(stage)
        return np.where(table <= worst, np.square(table), np.inf)

    balanced = min_sum(squares, depth)
    return None if balanced is None else Split(stops=balanced.stops, cost=worst)


def min_sum(costs: Costs, depth: int) -> Split | None:
    """The split of the least sum; None if there is none."""
    suffixes = _fold(costs, depth, np.add)
    total = _best(suffixes)
    if not np.isfinite(total):
        return None
    stops: list[int] = []
    row = 0
    for stage in range(depth - 1):
        row = int(np.argmin(costs(stage)[row] + suffixes[stage + 1]))
        stops.append(stage + row + 1)
    return Split(stops=(*stops, depth + len(suffixes[0]) - 1), cost=total)


def _fold(costs: Costs, depth: int, combine: np.ufunc) -> list[FloatArray]:
    """The best cost of stages s.. by the start of stage s, for every s."""
    suffixes = [costs(depth - 1)[:, -1]]
    for stage in reversed(range(depth - 1)):
        suffixes.append(combine(costs(stage), suffixes[-1]).min(axis=1))
    return suffixes[::-1]


def _best(suffixes: list[FloatArray]) -> float:
    return float(suffixes[0][0])
