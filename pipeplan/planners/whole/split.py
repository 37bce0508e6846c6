"""Split: stages of the least bottleneck whose ranks fit, found by bisection over the bottleneck.

Stages are filled one after the other, each with as many blocks as the bottleneck and the memory allow: if any stages
fit, these do, since a stage that begins later takes and holds no more. Where ranks hold several stages, each may take
its share of the rank's bottleneck, and what a rank holds is looked at afterwards.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.planners.whole.degrees import Degrees
from pipeplan.planners.whole.terms import ReplicaTerms

_STEPS = 24
"""Bisections: the bottleneck is then within a millionth of the least."""


def in_flight(degrees: Degrees, rank: int) -> float:
    """Microbatches that a rank keeps at most, in microbatches of all its stages (Narayanan 2021, section 2.2)."""
    p, v, m = degrees.pipeline, degrees.chunks, degrees.microbatches
    if v == 1:
        return min(p - rank, m)
    return min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v) / v


@dataclass(frozen=True, kw_only=True, eq=False)
class Splitter:
    """Splits a configuration's blocks into stages."""

    terms: ReplicaTerms
    degrees: Degrees
    device_bytes: float

    def stops(self) -> tuple[int, ...] | None:
        """Where the stages end; None where none fit."""
        depth, step_s = self.degrees.depth, self._step_s
        high_s = step_s[-1]
        found = self._filled(high_s)
        if found is None:
            return None
        low_s = step_s[-1] / depth
        for _ in range(_STEPS):
            middle_s = (low_s + high_s) / 2
            stops = self._filled(middle_s)
            if stops is None:
                low_s = middle_s
            else:
                found, high_s = stops, middle_s
        return found

    def held_bytes(self, stops: Sequence[int]) -> list[float]:
        """What each stage's device holds: states, microbatches in flight, and the most that a block holds on top.

        Where ranks hold several stages, each has its share of a rank's microbatches; what is on top counts once.
        """
        degrees, held = self.degrees, []
        for stage, (start, stop) in enumerate(zip((0, *stops), stops, strict=False)):
            rank = stage % degrees.pipeline
            held.append(self._bytes(rank, start, stop) - (self._transient(start, stop) if degrees.chunks > 1 else 0.0))
        for rank in range(degrees.pipeline if degrees.chunks > 1 else 0):
            stages = range(rank, degrees.depth, degrees.pipeline)
            held[rank] += max(self._transient(stops[s - 1] if s else 0, stops[s]) for s in stages)
        return held

    def fits(self, stops: Sequence[int]) -> bool:
        """Whether every rank fits its device."""
        held, p = self.held_bytes(stops), self.degrees.pipeline
        return all(sum(held[rank::p]) <= self.device_bytes for rank in range(p))

    def _filled(self, bottleneck_s: float) -> tuple[int, ...] | None:
        depth, blocks, step_s = self.degrees.depth, len(self._step_s) - 1, self._step_s
        start, stops = 0, []
        for stage in range(depth):
            last = blocks - (depth - 1 - stage)
            stop = min(bisect_right(step_s, step_s[start] + bottleneck_s) - 1, last)
            stop = self._that_fits(stage, start, stop)
            if stop <= start:
                return None
            stops.append(stop)
            start = stop
        if start < blocks:
            return None
        if self.degrees.chunks > 1 and not self.fits(stops):
            return None
        return tuple(stops)

    def _that_fits(self, stage: int, start: int, stop: int) -> int:
        """The last place up to `stop` where a stage may end by its memory; ranks of several stages count later."""
        if self.degrees.chunks > 1 or stop <= start:
            return stop
        low, high = start, stop
        while low < high and self._bytes(stage, start, high) > self.device_bytes:
            middle = (low + high) // 2
            if self._bytes(stage, start, middle + 1) <= self.device_bytes:
                low = middle + 1
            else:
                high = middle
        return high

    def _bytes(self, rank: int, start: int, stop: int) -> float:
        fixed, kept = self._fixed_bytes, self._kept_bytes
        held = in_flight(self.degrees, rank) * (kept[stop] - kept[start])
        return fixed[stop] - fixed[start] + held + self._transient(start, stop)

    def _transient(self, start: int, stop: int) -> float:
        """The most of any block in [start, stop)."""
        table, level = self._most, (stop - start).bit_length() - 1
        return float(max(table[level][start], table[level][stop - 2**level]))

    @cached_property
    def _most(self) -> list[FloatArray]:
        """By level, the most of 2^level blocks from each one on."""
        table = [self.terms.transient_bytes]
        while len(table[-1]) > 2 ** (len(table) - 1):
            half, before = 2 ** (len(table) - 1), table[-1]
            table.append(np.maximum(before[:-half], before[half:]))
        return table

    @cached_property
    def _step_s(self) -> list[float]:
        return self.terms.step_s.tolist()  # type: ignore[no-any-return]

    @cached_property
    def _fixed_bytes(self) -> list[float]:
        return self.terms.fixed_bytes.tolist()  # type: ignore[no-any-return]

    @cached_property
    def _kept_bytes(self) -> list[float]:
        return self.terms.kept_bytes.tolist()  # type: ignore[no-any-return]
