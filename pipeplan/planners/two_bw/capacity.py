"""Capacity: how short the longest stage can be at best, because memory limits what each stage computes.

In t seconds a stage computes at most t of the blocks' least seconds. Memory allows less: without recomputation the
longest run of blocks that fits with the microbatches in flight at its place; with recomputation more blocks, which take
longer. All stages together must compute all blocks. The least t for which they can is a bound, for every depth at once.
It gives the cost of memory in seconds, while `fewest` counts stages one by one. It does not count transfers.
"""

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.two_bw.fewest import FewestStages
from pipeplan.planners.two_bw.split import ROUNDING

NEXT_PLACE = 1.5
"""Capacity is computed for numbers of downstream stages in this ratio; others take that of the next smaller one."""

HALVINGS = 12
"""The number of times that the gap to the least seconds is halved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCapacity:
    """The bound for the stages of `count`, at every depth up to `deepest`, if a batch fills the pipeline."""

    count: FewestStages
    deepest: int

    @cached_property
    def least_s(self) -> FloatArray:
        """[depth]: the least compute of the longest stage, in seconds; infinite if memory allows no split."""
        depth = np.arange(1, self.deepest + 1)
        total_s = self._sums_s[-1]
        high = np.full(self.deepest, total_s / min(1.0, self._share or 1.0))
        low = total_s / depth
        low[self._computed(high) < total_s * (1 - ROUNDING)] = inf
        for _ in range(HALVINGS):
            middle = np.where(low < inf, np.sqrt(low * high), total_s)
            enough = self._computed(middle) >= total_s * (1 - ROUNDING)
            high, low = np.where(enough, middle, high), np.where(enough, low, np.maximum(low, middle))
        return np.append(0.0, low * (1 - ROUNDING))

    def _computed(self, limit_s: FloatArray) -> FloatArray:
        """[depth]: the part of the blocks' least seconds that all stages together compute within their limit."""
        others = np.arange(self.deepest)
        again_s = limit_s * self._share
        plain_s, either_s = self._inner_s
        whole = np.minimum(_reaching(plain_s, limit_s), others)
        kept = np.clip(_reaching(plain_s, again_s), whole, others)
        again = np.clip(_reaching(either_s, again_s), kept, others)
        plain_sums_s, either_sums_s = self._inner_sums_s
        inner_s = whole * limit_s + (plain_sums_s[kept] - plain_sums_s[whole]) + (again - kept) * again_s
        inner_s += either_sums_s[others] - either_sums_s[again]
        plain_s, either_s = self._first_s
        first_s = np.maximum(np.minimum(plain_s, limit_s), np.minimum(either_s, again_s))
        return np.asarray(inner_s + first_s)

    @cached_property
    def _sums_s(self) -> FloatArray:
        """Sums of the blocks' least seconds."""
        return np.asarray(self.count.chain.least_s)

    @cached_property
    def _share(self) -> float:
        """Upper bound on the least seconds that a second with recomputation computes; 0 if no stage recomputes."""
        if True not in self.count.modes:
            return 0.0
        least_s, again_s = np.diff(self._sums_s), np.diff(self.count.chain.recomputed_s)
        takes = again_s > 0
        return float(np.max(least_s[takes] / again_s[takes], initial=0.0)) * (1 + ROUNDING)

    @cached_property
    def _places(self) -> IntArray:
        places = [1]
        while places[-1] < self.deepest:
            places.append(max(places[-1] + 1, int(places[-1] * NEXT_PLACE)))
        return np.asarray(places)

    @property
    def _inner_s(self) -> tuple[FloatArray, FloatArray]:
        """[place - 1]: the compute that memory allows a stage, without recomputation and in either mode, descending."""
        return self._by_place[0], self._by_place[1]

    @cached_property
    def _inner_sums_s(self) -> tuple[FloatArray, FloatArray]:
        plain_s, either_s = self._inner_s
        return np.append(0.0, np.cumsum(plain_s)), np.append(0.0, np.cumsum(either_s))

    @property
    def _first_s(self) -> tuple[FloatArray, FloatArray]:
        """The same for the first stage, by the number of stages."""
        return self._by_place[2], self._by_place[3]

    @cached_property
    def _by_place(self) -> FloatArray:
        known, sums_s = np.zeros((4, len(self._places))), self._sums_s
        for column, place in enumerate(self._places.tolist()):
            for (mode, _), limit in zip(self.count.ways, self.count.limits(place), strict=True):
                rooms, row = limit.held + limit.room, int(mode)
                last = limit.held.searchsorted(rooms, side="right") - 1
                run_s = float(np.maximum.reduce(sums_s[last] - sums_s)) if limit.room >= 0 else 0.0
                first = int(limit.held.searchsorted(limit.first_room, side="right")) - 1
                known[row, column] = max(known[row, column], run_s)
                known[2 + row, column] = max(known[2 + row, column], sums_s[max(first, 0)])
        known[1::2] = np.maximum(known[::2], known[1::2])
        columns = np.searchsorted(self._places, np.arange(1, self.deepest + 1), side="right") - 1
        return np.minimum.accumulate(known, axis=1)[:, columns]


def _reaching(falling: FloatArray, values: FloatArray) -> IntArray:
    """By value, the number of leading entries that are at least as large."""
    return np.searchsorted(-falling, -values, side="right")
