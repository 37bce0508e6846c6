"""Pairs: whether ranks of two stages stay within their limits, decided by a recurrence over the ranks.

Ranks 0 to r - 1 have the blocks [0, a) in their first stages. In a loop their second stages have the blocks [h, b),
where the last rank's first stage ends at h; in a V they have the last b blocks of the model. From each (a, b) that some
stages reach, rank r extends each stage by some length. No order among costs is assumed: the recurrence is exact for any
limits. The steps, as the comments number them:

1. A loop's recurrence runs for all h at once: the h for which a pair (a, b) is reached are the bits of a few words.
2. A pair is dropped, for some h, where the remaining ranks cannot compute the remaining blocks within the step.
3. The last rank takes the remaining blocks.
4. Of the stages within the limits those are taken whose seconds have the least sum of squares, for h near the middle.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.interleaved.limits import Way, Within

Charge = Callable[[int], None]
"""Gets the number of table entries whenever some are read. It may raise to end the search."""

_EACH_LOOK = 2000
"""The fixed cost of reading a table, in entries."""

WordArray = npt.NDArray[np.uint64]
"""Bits."""

_Step = tuple[int, int, IntArray]
"""A length of each stage, and the pairs from which a rank may take it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """The question whether there are stages within these limits."""

    within: Within
    charge: Charge
    _ways: dict[int, tuple[Way, ...]] = field(default_factory=dict)

    def stops(self, most_middles: int = 1) -> tuple[int, ...] | None:
        """The stops of all stages within the limits; None if there are none. More middles give more even stages."""
        middles = self.middles()
        if not middles:
            return None
        sums_s = self._work_s
        middles.sort(key=lambda middle: abs(2 * sums_s[middle] - sums_s[-1]))
        every = [self._most_even(middle) for middle in middles[:most_middles]]  # step 4
        return min(every)[1]

    def middles(self) -> list[int]:
        """Where the first stages of all ranks together may end; of a V only whether they may end anywhere: [0]."""
        # Step 1: no rank has any block yet, and every h is possible.
        seconds = np.zeros(1, dtype=np.int64)
        bits = np.ones((1, 1), dtype=np.uint64)
        if not self._in_v:
            seconds = np.arange(self._ranks, self._blocks - self._ranks + 1)
            bits = self._below[seconds + 1] & ~self._below[seconds]
        firsts = np.zeros_like(seconds)
        for rank in range(self._ranks - 1):
            reached = np.zeros((self._blocks + 1, self._blocks + 1, bits.shape[1]), dtype=np.uint64)
            for first, second, pairs in self._steps(rank, firsts, seconds):
                reached[firsts[pairs] + first, seconds[pairs] + second] |= bits[pairs]
            firsts, seconds = np.nonzero(reached.any(axis=2))
            bits = self._possible(rank, firsts, seconds, reached[firsts, seconds])
            left = bits.any(axis=1)
            firsts, seconds, bits = firsts[left], seconds[left], bits[left]
            if not len(firsts):
                return []
        closing = self._closing(firsts, seconds)
        if self._in_v:
            return [0] if closing.any() else []
        closing &= np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : self._blocks + 1].astype(bool)
        found: list[int] = np.nonzero(closing.any(axis=0))[0].tolist()
        return found

    @property
    def _ranks(self) -> int:
        return self.within.terms.shape.ranks

    @property
    def _blocks(self) -> int:
        return self.within.terms.blocks

    @property
    def _in_v(self) -> bool:
        return self.within.terms.shape.laws.v_shaped

    @cached_property
    def _work_s(self) -> FloatArray:
        """The least compute of the blocks before each boundary."""
        return np.asarray(self.within.terms.work_s)

    def _of_rank(self, rank: int) -> tuple[Way, ...]:
        if rank not in self._ways:
            self._ways[rank] = tuple(self.within.ways(rank))
        return self._ways[rank]

    @cached_property
    def _below(self) -> WordArray:
        """Row k: the bits of all h below k."""
        words = self._blocks // 64 + 1
        bits = np.tri(self._blocks + 2, 64 * words, k=-1, dtype=bool)
        packed: WordArray = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
        return packed

    def _possible(self, rank: int, firsts: IntArray, seconds: IntArray, bits: WordArray) -> WordArray:
        """Step 2: the remaining bits of the pairs after a rank."""
        work_s, left = self._work_s, self._ranks - 1 - rank
        most_s = left * self.within.step_s * (1 + 1e-9)
        if self._in_v:
            ends = self._blocks - seconds
            fine = (ends - firsts >= 2 * left) & (work_s[np.maximum(ends, firsts)] - work_s[firsts] <= most_s)
            return np.where(fine[:, None], bits, np.uint64(0))
        reach_s = most_s + work_s[firsts] - (work_s[-1] - work_s[seconds])
        highest = np.searchsorted(work_s, reach_s, side="right")  # h is below it
        highest = np.where(self._blocks - seconds >= left, highest, 0)
        return bits & self._below[highest] & ~self._below[np.minimum(firsts + left, self._blocks + 1)]

    def _steps(self, rank: int, firsts: IntArray, seconds: IntArray) -> Iterator[_Step]:
        """The steps that a rank may take, in any of its modes."""
        for way in self._of_rank(rank):
            first_rows = [_by_length(limit.tables[0]) for limit in way]
            second_rows = [_by_length(self._second(limit.tables[1])) for limit in way]
            least = [rows.min(axis=1) for rows in second_rows]
            for length in range(1, self._blocks + 1):
                left = [limit.most - rows[length][firsts] for limit, rows in zip(way, first_rows, strict=True)]
                fine = np.logical_and.reduce([a >= b.min() for a, b in zip(left, least, strict=True)])
                pairs = np.nonzero(fine)[0]
                self.charge(_EACH_LOOK + len(firsts))
                if not len(pairs):
                    continue
                left = [each[pairs] for each in left]
                from_seconds = seconds[pairs]
                most = [float(each.max()) for each in left]
                others = np.nonzero(np.logical_and.reduce([a <= b for a, b in zip(least, most, strict=True)]))[0]
                self.charge(len(others) * (_EACH_LOOK + len(pairs) * len(way)))
                for other in others.tolist():
                    takes = second_rows[0][other][from_seconds] <= left[0]
                    for rows, each in zip(second_rows[1:], left[1:], strict=True):
                        takes &= rows[other][from_seconds] <= each
                    if takes.any():
                        yield length, other, pairs[takes]

    def _closing(self, firsts: IntArray, seconds: IntArray) -> BoolArray:
        """Step 3: [pair, h]: whether the last rank may take the remaining blocks."""
        found = np.zeros((len(firsts), self._blocks + 1), dtype=bool)
        for way in self._of_rank(self._ranks - 1):
            fine = np.ones_like(found)
            for limit in way:
                second = self._second(limit.tables[1])[seconds]
                last = second[:, ::-1] if self._in_v else second[:, -1:]
                fine &= limit.tables[0][firsts] + last <= limit.most
                self.charge(fine.size)
            found |= fine
        return found

    def _second(self, table: FloatArray) -> FloatArray:
        """A table of second stages; in a V by the number of blocks that follow the stage, and its start."""
        return table[::-1, ::-1].T if self._in_v else table

    def _most_even(self, middle: int) -> tuple[float, tuple[int, ...]]:
        """Step 4: the least sum of squares for this h, and the stops."""
        blocks, ranks = self._blocks, self._ranks
        seconds_s = np.asarray(self.within.terms.chain.compute_s)
        table = np.square(seconds_s - seconds_s[:, None])
        first_squares, second_squares = table, self._second(table)
        firsts, seconds, values = np.zeros(1, dtype=np.int64), np.full(1, middle), np.zeros(1)
        bits = self._below[middle + 1 : middle + 2] & ~self._below[middle]
        taken: list[IntArray] = []
        for rank in range(ranks - 1):
            least = np.full((blocks + 1, blocks + 1), inf)
            lengths = np.zeros((blocks + 1, blocks + 1, 2), dtype=np.int64)
            for first, second, pairs in self._steps(rank, firsts, seconds):
                a, b = firsts[pairs], seconds[pairs]
                sums = values[pairs] + first_squares[a, a + first] + second_squares[b, b + second]
                better = sums < least[a + first, b + second]
                a, b = a[better] + first, b[better] + second
                least[a, b] = sums[better]
                lengths[a, b] = first, second
            firsts, seconds = np.nonzero(np.isfinite(least))
            possible = self._possible(rank, firsts, seconds, np.repeat(bits, len(firsts), axis=0)).any(axis=1)
            firsts, seconds = firsts[possible], seconds[possible]
            values = least[firsts, seconds]
            taken.append(lengths)
        closing = self._closing(firsts, seconds)
        if not self._in_v:
            closing[:, :middle] = closing[:, middle + 1 :] = False
        last = np.arange(blocks + 1)
        ends = blocks - last if self._in_v else np.full(blocks + 1, blocks)
        sums = values[:, None] + first_squares[firsts[:, None], last] + second_squares[seconds[:, None], ends]
        sums = np.where(closing, sums, inf)
        pair, h = (int(place) for place in np.unravel_index(int(np.argmin(sums)), sums.shape))

        first, second = int(firsts[pair]), int(seconds[pair])
        first_stops, second_stops = [h], [int(ends[h])]
        for lengths in reversed(taken):
            first_stops.append(first)
            second_stops.append(second)
            back = lengths[first, second]
            first, second = first - int(back[0]), second - int(back[1])
        stops = first_stops[::-1]
        if self._in_v:  # a rank's second stage ends where the next rank's begins
            return float(sums[pair, h]), (*stops, *(blocks - b for b in second_stops[1:]), blocks)
        return float(sums[pair, h]), (*stops, *second_stops[::-1])


def _by_length(table: FloatArray) -> FloatArray:
    """[length, start] of [start, stop]."""
    size = len(table)
    starts = np.arange(size)
    stops = starts + starts[:, None]
    return np.where(stops < size, table[starts, np.minimum(stops, size - 1)], inf)
