"""In turn: stages for slow links, where neighbouring ranks wait for each other.

Under 1F1B two neighbours together take a round trip for two microbatches (`planners.bound`, 8). If a slow link is
between them, they need fewer blocks, and ranks at faster links more. Filling stages one after the other ignores this: a
rank must leave time for the next one. So for every end of a rank's stage, the search keeps its latest start: no other
start leaves the next rank as much. The search ignores turns of three and more ranks.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.whole.split import Splitter

SLOW_LINK = 0.1
"""The share of a rank's mean compute from which on a round trip over a link may change the best stages."""

_BETTER = 0.03
"""The required gain of other stages, as a share of the batch. With a smaller gain, even stages mostly play faster; most
configurations have none, after one try.
"""

_STEPS = 6
"""Bisections, after which a batch is known to about a hundredth of the possible gain."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InTurn:
    """Splits a configuration's blocks. `reached_s` are the hops to each rank and back, `placed_s` sums of the blocks'
    exchange time on the placement beyond the minimum over placements.
    """

    splitter: Splitter
    reached_s: FloatArray
    placed_s: FloatArray

    def batch_s(self, stops: tuple[int, ...]) -> float:
        """An estimate of a batch's time with these stages, by its bound: the first rank exchanges last."""
        return self.splitter.times.of(stops, self.reached_s) + float(self.placed_s[stops[0]])

    def shortest(self, known: tuple[int, ...]) -> tuple[int, ...] | None:
        """Stages with a shorter batch than the known ones, by its bound; None if the search finds none."""
        splitter, degrees = self.splitter, self.splitter.degrees
        hops_s = np.diff(self.reached_s)
        if degrees.chunks > 1 or not len(hops_s):
            return None
        if hops_s.max() < SLOW_LINK * float(splitter.terms.step_s[-1]) / degrees.pipeline:
            return None
        found, best_s, low_s = None, self.batch_s(known), splitter.least_s
        middle_s = high_s = best_s * (1 - _BETTER)
        for _ in range(_STEPS):
            stops = self._within(middle_s, float(self._end_s[(found or known)[0]]))
            if stops is None and middle_s == high_s:
                return found
            if stops is None:
                low_s = middle_s
            else:
                high_s = middle_s
                if (batch_s := self.batch_s(stops)) < best_s:
                    found, best_s, high_s = stops, batch_s, min(high_s, batch_s)
            middle_s = (low_s + high_s) / 2
        return found

    def _within(self, batch_s: float, end_s: float) -> tuple[int, ...] | None:
        """Fitting stages with a batch of at most `batch_s`, at whose end the first rank exchanges and updates for
        `end_s`.
        """
        splitter, step_s, forward_s = self.splitter, self.splitter.terms.step_s, self.splitter.terms.forward_s
        p, m, blocks = splitter.degrees.pipeline, splitter.degrees.microbatches, len(step_s) - 1
        turning_s = batch_s - end_s - float(step_s[-1] + self.reached_s[-1])
        latest, chosen = np.zeros(1, dtype=np.int64), list[IntArray]()
        starts = np.zeros(1, dtype=np.int64)
        for rank in range(p):
            held = p - rank
            stops = np.minimum(self.stops_alone(rank, starts, batch_s), self.splitter.last_fitting[rank][starts])
            if held < m:
                own_s = (held - 1) * forward_s + (m - held) * step_s
                stops = np.minimum(stops, np.searchsorted(own_s, own_s[starts] + turning_s, side="right") - 1)
            if rank > 0 and held + 1 < m:
                trips, left = divmod(m - held, 2)
                before_s, first_s = (each[starts] - each[latest] for each in (step_s, forward_s))
                room_s = (turning_s - (held - 1) * first_s - left * before_s) / max(trips, 1)
                room_s -= float(self.reached_s[rank] - self.reached_s[rank - 1]) + before_s
                stops = np.minimum(stops, np.searchsorted(step_s, step_s[starts] + room_s, side="right") - 1)
            stops = np.minimum(stops, blocks - held + 1)
            by_stop = np.full(blocks + 1, -1, dtype=np.int64)
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                by_stop[start + 1 : stop + 1] = start
            chosen.append(by_stop)
            starts = np.flatnonzero(by_stop >= 0)
            if not len(starts):
                return None
            latest = by_stop[starts]
        stop, found = blocks, list[int]()
        for by_stop in reversed(chosen):
            if by_stop[stop] < 0:
                return None
            found.append(stop)
            stop = int(by_stop[stop])
        return tuple(reversed(found)) if splitter.fits(found[::-1]) else None

    def stops_alone(self, rank: int, starts: IntArray, batch_s: float) -> IntArray:
        """The last place where a stage from each start may end, by its own work and by its round trips."""
        times, step_s = self.splitter.times, self.splitter.terms.step_s
        p, m = self.splitter.degrees.pipeline, self.splitter.degrees.microbatches
        alone_s = times.alone_s + self.placed_s
        stops = np.searchsorted(alone_s, alone_s[starts] + batch_s, side="right") - 1
        if rank == 0:
            return np.asarray(stops)
        after_s = float(self.reached_s[-1] - self.reached_s[rank])
        left_s = batch_s - step_s[starts] - float(self.reached_s[rank] + self._end_s[1])
        rounds_s = m * (step_s[-1] - step_s[starts] + after_s) / min(p - rank, m)
        windows = np.searchsorted(step_s, step_s[starts] + left_s / m, side="right") - 1
        return np.where(rounds_s > left_s, starts, np.minimum(stops, windows))

    @cached_property
    def _end_s(self) -> FloatArray:
        return self.splitter.times.end_s + self.placed_s
