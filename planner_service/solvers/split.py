"""Split: blocks into stages whose places are known, by a recurrence over the tables of their kinds."""

from collections.abc import Sequence

import numpy as np

from planner_service.core.cost.compute import FloatArray


def least_worst(tables: Sequence[FloatArray]) -> float:
    """The largest entry of the split in which it is least; infinite where there is no split. O(stages n^2)."""
    return float(_fold(tables, np.maximum, -np.inf)[-1][-1])


def balanced(tables: Sequence[FloatArray]) -> tuple[int, ...] | None:
    """The stops of the split of the least largest entry; of those the one with the least sum of squares."""
    worst = least_worst(tables)
    if not np.isfinite(worst):
        return None
    squares = [np.where(table <= worst, np.square(table), np.inf) for table in tables]
    folds = _fold(squares, np.add, 0.0)
    stops = [len(tables[0])]
    for stage in reversed(range(len(tables))):
        before = folds[stage][:-1] + squares[stage][:, stops[-1] - 1]
        stops.append(int(np.argmin(before)))
    return tuple(stops[-2::-1])


def least_excess(tables: Sequence[FloatArray]) -> tuple[int, ...] | None:
    """As `balanced`, of entries that may be negative."""
    finite = [table[np.isfinite(table)] for table in tables]
    if not all(len(entries) for entries in finite):
        return None
    least = min(float(entries.min()) for entries in finite)
    return balanced([table - least for table in tables])


def _fold(tables: Sequence[FloatArray], combine: np.ufunc, nothing: float) -> list[FloatArray]:
    """The best of the stages before s on the blocks [0, i), as [s][i]."""
    best = np.full(len(tables[0]) + 1, np.inf)
    best[0] = nothing
    folds = [best]
    for table in tables:
        best = np.append(np.inf, combine(folds[-1][:-1, None], table).min(axis=0))
        folds.append(best)
    return folds
