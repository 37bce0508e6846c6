"""Split: fitting stages with the shortest batch by its bound, found by bisection over the batch's seconds.

Stages are filled one after the other, each with as many blocks as the batch's seconds and the memory allow. If any
stages fit, these do, since a stage that begins later takes and holds no more. If ranks hold several stages, these have
the least bottleneck and are as even in time as possible; if a rank then does not fit, blocks move from its stages to
neighbouring ones.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.whole.batch_times import BatchTimes
from pipeplan.planners.whole.degrees import Degrees
from pipeplan.planners.whole.terms import ReplicaTerms

_MOVES = 12
"""Upper bound on the blocks that are moved to make ranks with several stages fit."""

PASSING_BLOCKS = 2
"""Blocks whose activations are on a device at once if they are offloaded."""

_STEPS = 24
"""Bisections, after which the seconds are within a millionth of the least."""

_NEAR = 1e-5
"""The bisection ends when a batch's seconds are known to this relative precision."""


def in_flight(degrees: Degrees, rank: int) -> float:
    """Upper bound on a rank's microbatches, in microbatches of all its stages (Narayanan 2021, section 2.2).

    It keeps another one of a stage where every backward overlaps a forward (`Recipe.a2a_overlap`).
    """
    p, v, m, beside = degrees.pipeline, degrees.chunks, degrees.microbatches, int(degrees.recipe.a2a_overlap)
    if v == 1:
        return min(p - rank + beside, m)
    return min(2 * (p - rank - 1) + (v - 1) * p + 1 + beside, m * v) / v


@dataclass(frozen=True, kw_only=True, eq=False)
class Splitter:
    """Splits a configuration's blocks into stages."""

    terms: ReplicaTerms
    degrees: Degrees
    device_bytes: float
    host_bytes: float = inf

    def stops(self) -> tuple[int, ...] | None:
        """The stages' stops; None if none fit. For ranks with several stages, the search may miss some that fit."""
        return next(iter(self.several()), None)

    def several(self) -> tuple[tuple[int, ...], ...]:
        """These, and others found during the search, the shortest batch by its bound first. On a placement with slow
        links between some ranks, another one may be the fastest.
        """
        return self._found[0]

    @property
    def least_s(self) -> float:
        """A lower bound on a batch's seconds in any play of any stages; infinite if none fit.

        0 for ranks with several stages, where it is not known.
        """
        return self._found[1]

    @cached_property
    def times(self) -> BatchTimes:
        """The bounds of a batch's seconds."""
        return BatchTimes(terms=self.terms, degrees=self.degrees)

    @cached_property
    def _found(self) -> tuple[tuple[tuple[int, ...], ...], float]:
        """The stages found, and the lower bound on the seconds of any stages."""
        if self.degrees.chunks == 1:
            return self._quickest()
        found = self._least(inf)
        if found is None:
            return (), inf
        even = self._evened(found)
        return (self._squeezed(even) or even,), 0.0

    def _quickest(self) -> tuple[tuple[tuple[int, ...], ...], float]:
        """Fitting stages with short batches, by their bound; and the longest batch for which none fit.

        Those of the least bottleneck are among them: where hops decide, they may be the fastest.
        """
        high_s, low_s = self.times.longest_s(), 0.0
        found, even = self._in_time(high_s), self.even()
        if found is None:
            return (), inf
        every = {each: self.times.of(each) for each in (found, even) if each is not None}
        for _ in range(_STEPS):
            high_s = min(high_s, self.times.filled_s(found))
            if low_s >= high_s * (1 - _NEAR):
                break
            middle_s = (low_s + high_s) / 2
            others = self._in_time(middle_s)
            if others is None:
                low_s = middle_s
            else:
                found, high_s = others, middle_s
                every[found] = self.times.of(found)
        # The bound took the first rank's end for that of one block. Filling from the last stage leaves it few blocks.
        for batch_s in (high_s, min(every.values())):
            others = self._in_time_from_the_end(batch_s)
            if others is not None:
                every[others] = self.times.of(others)
        return tuple(sorted(every, key=lambda stops: (every[stops], stops))), low_s

    def _in_time(self, batch_s: float) -> tuple[int, ...] | None:
        """Fitting stages with a batch of at most `batch_s`, by its bound; None if there are none."""
        depth, blocks = self.degrees.depth, len(self._step_s) - 1
        start, stops = 0, []
        for rank in range(depth):
            in_time = self.times.stop(rank, start, batch_s)
            stop = self._that_fits(rank, start, min(in_time, blocks - (depth - 1 - rank)), self.device_bytes)
            if stop <= start:
                return None
            stops.append(stop)
            start = stop
        return tuple(stops) if start == blocks else None

    def _in_time_from_the_end(self, batch_s: float) -> tuple[int, ...] | None:
        """The same, with as many blocks as possible in the last stages."""
        stop, stops = len(self._step_s) - 1, list[int]()
        for rank in range(self.degrees.depth - 1, -1, -1):
            stops.append(stop)
            low, high = rank, stop
            while low < high:
                middle = (low + high) // 2
                in_time = self.times.stop(rank, middle, batch_s) >= stop
                if in_time and self._last_fitting[rank][middle] >= stop:
                    high = middle
                else:
                    low = middle + 1
            if low >= stop:
                return None
            stop = low
        return tuple(reversed(stops)) if stop == 0 else None

    def _evened(self, stops: tuple[int, ...]) -> tuple[int, ...]:
        """Stages as near to equal shares of the remaining time as the same bottleneck allows. Until then the stages are
        filled from the first one on, and the last ones have only the remainder.
        """
        step_s, depth = self._step_s, len(stops)
        most_s = max(step_s[stop] - step_s[start] for start, stop in zip((0, *stops), stops, strict=False)) * (1 + 1e-9)
        earliest = [stops[-1]]  # the earliest stop of each stage that lets the later ones hold the rest
        for stage in range(depth - 1, 0, -1):
            first = bisect_left(step_s, step_s[earliest[-1]] - most_s)
            earliest.append(min(max(first, stage), earliest[-1] - 1))
        start, evened = 0, list[int]()
        for stage, least in enumerate(reversed(earliest)):
            share_s = (step_s[-1] - step_s[start]) / (depth - stage)
            latest = min(bisect_right(step_s, step_s[start] + most_s) - 1, stops[-1] - (depth - 1 - stage))
            place = min(bisect_left(step_s, step_s[start] + share_s), len(step_s) - 1)  # rounding may pass the end
            if (
                place > start + 1
                and step_s[place] - step_s[start] - share_s > share_s - step_s[place - 1] + step_s[start]
            ):
                place -= 1
            start = max(min(place, latest), least, start + 1)
            evened.append(start)
        return tuple(evened)

    def _squeezed(self, stops: tuple[int, ...]) -> tuple[int, ...] | None:
        """The same stages if all ranks fit, or others after some blocks have moved; None if that does not help.

        Each time, a block moves from a stage of the fullest rank to a neighbouring stage. The search takes the move
        after which the fullest rank holds least.
        """
        now = self.by_rank(stops)
        if sum(now) > self.device_bytes * len(now):
            return None
        for _ in range(_MOVES):
            if max(now) <= self.device_bytes:
                return stops
            fullest = now.index(max(now))
            others = list(self._without_a_block(stops, fullest))
            held, stops = min(((self.by_rank(other), other) for other in others), key=lambda each: max(each[0]))
            if max(held) >= max(now):
                return None
            now = held
        return stops if max(now) <= self.device_bytes else None

    def _without_a_block(self, stops: tuple[int, ...], rank: int) -> Iterator[tuple[int, ...]]:
        """The stages themselves, then all with one stage of a rank less its first or its last block."""
        yield stops
        for stage in range(rank, self.degrees.depth, self.degrees.pipeline):
            start = stops[stage - 1] if stage else 0
            if stops[stage] - start > 1:
                if stage:
                    yield (*stops[: stage - 1], start + 1, *stops[stage:])
                if stage < self.degrees.depth - 1:
                    yield (*stops[:stage], stops[stage] - 1, *stops[stage + 1 :])

    def by_rank(self, stops: Sequence[int]) -> list[float]:
        """The bytes that every rank holds."""
        return self._summed(self.held_bytes(stops))

    def hosts_by_rank(self, stops: Sequence[int]) -> list[float]:
        """The bytes that every rank has on its host."""
        return self._summed(self.held_by_hosts(stops))

    def _summed(self, by_stage: FloatArray) -> list[float]:
        by_rank = by_stage.reshape(-1, self.degrees.pipeline).sum(axis=0)
        return by_rank.tolist()  # type: ignore[no-any-return]

    def even(self) -> tuple[int, ...] | None:
        """The stages of the least bottleneck; None where none fit."""
        return self._least(self.device_bytes) if self.degrees.chunks == 1 else self.stops()

    def _least(self, room: float) -> tuple[int, ...] | None:
        """The stages of the least bottleneck within a capacity of `room` bytes each."""
        step_s = self._step_s
        high_s, low_s = step_s[-1], step_s[-1] / self.degrees.depth
        found, _ = self._filled(high_s, room)
        for _ in range(_STEPS if found else 0):
            if low_s >= high_s * (1 - 1e-9):
                break
            middle_s = (low_s + high_s) / 2
            stops, more_s = self._filled(middle_s, room)
            if stops is None:
                low_s = max(middle_s, more_s * (1 - 1e-12))
            else:
                found = stops
                high_s = max(step_s[stop] - step_s[start] for start, stop in zip((0, *stops), stops, strict=False))
        return found

    def held_bytes(self, stops: Sequence[int]) -> FloatArray:
        """The bytes that each stage's device holds: states, microbatches in flight, and the largest block's transient
        bytes.

        If ranks hold several stages, each has its share of the rank's microbatches; transient bytes count once.
        """
        terms, flight, starts, ends = self.terms, *self._stages(stops)
        left = terms.left_bytes[ends] - terms.left_bytes[starts]
        passing = PASSING_BLOCKS * np.maximum.reduceat(np.diff(terms.left_bytes), starts)
        on_top = np.maximum.reduceat(terms.transient_bytes, starts) + np.minimum(flight * left, passing)
        states = terms.states.fixed_bytes[ends] - terms.states.fixed_bytes[starts]
        held: FloatArray = states + flight * (terms.kept_bytes[ends] - terms.kept_bytes[starts])
        p = self.degrees.pipeline
        held[:p] += on_top.reshape(-1, p).max(axis=0)
        return held

    def held_by_hosts(self, stops: Sequence[int]) -> FloatArray:
        """The bytes that each stage has on its host."""
        terms, flight, starts, ends = self.terms, *self._stages(stops)
        states = terms.states.host_bytes[ends] - terms.states.host_bytes[starts]
        return np.asarray(states + flight * (terms.left_bytes[ends] - terms.left_bytes[starts]))

    def _stages(self, stops: Sequence[int]) -> tuple[FloatArray, IntArray, IntArray]:
        """Every stage's microbatches in flight, its start and its stop."""
        p, ends = self.degrees.pipeline, np.asarray(stops)
        flight = np.tile([in_flight(self.degrees, rank) for rank in range(p)], self.degrees.chunks)
        return flight, np.append(0, ends[:-1]), ends

    def missing_bytes(self, stops: Sequence[int]) -> tuple[float, float]:
        """The excess of the fullest rank over its device, and over its host; negative where it fits."""
        return max(self.by_rank(stops)) - self.device_bytes, max(self.hosts_by_rank(stops)) - self.host_bytes

    def fits(self, stops: Sequence[int]) -> bool:
        """Whether every rank fits its device and its host."""
        return max(self.missing_bytes(stops)) <= 0

    def _filled(self, bottleneck_s: float, room: float) -> tuple[tuple[int, ...] | None, float]:
        """Stages as long as the bottleneck and the capacity allow, None if blocks remain; and the least bottleneck at
        which any of them could be longer.
        """
        depth, blocks, step_s = self.degrees.depth, len(self._step_s) - 1, self._step_s
        start, stops, more_s = 0, [], inf
        for stage in range(depth):
            last = blocks - (depth - 1 - stage)
            in_time = bisect_right(step_s, step_s[start] + bottleneck_s) - 1
            stop = self._that_fits(stage, start, min(in_time, last), room)
            if stop == in_time < last:
                more_s = min(more_s, step_s[stop + 1] - step_s[start])
            if stop <= start:
                return None, more_s
            stops.append(stop)
            start = stop
        return tuple(stops) if start == blocks else None, more_s

    def _that_fits(self, stage: int, start: int, stop: int, room: float) -> int:
        """The last place up to `stop` where a stage may end by its memory."""
        return stop if stop <= start or room == inf else min(self._last_fitting[stage][start], stop)

    @cached_property
    def _last_fitting(self) -> list[list[int]]:
        return self.last_fitting.tolist()  # type: ignore[no-any-return]

    @cached_property
    def last_fitting(self) -> IntArray:
        """[rank, start]: the last place where the single stage of a rank may end by its memory, by bisection."""
        terms, blocks = self.terms, len(self._step_s) - 1
        on_top, leaving = _most_within(terms.transient_bytes), _most_within(np.diff(terms.left_bytes))
        states = (terms.states.fixed_bytes, terms.kept_bytes, terms.left_bytes, terms.states.host_bytes)
        flight = np.asarray([[in_flight(self.degrees, rank)] for rank in range(self.degrees.pipeline)])
        starts = np.arange(blocks)[None, :]
        low, high = np.repeat(starts, len(flight), axis=0), np.full((len(flight), blocks), blocks)
        while (low < high).any():
            middle = (low + high + 1) // 2
            fixed, kept, left, host = (each[middle] - each[starts] for each in states)
            passing = np.minimum(flight * left, PASSING_BLOCKS * leaving[starts, middle - 1])
            held = fixed + flight * kept + on_top[starts, middle - 1] + passing
            fits = (held <= self.device_bytes) & (host + flight * left <= self.host_bytes)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return np.hstack([low, np.full((len(flight), 1), blocks)])

    def on_top(self, rank: int, start: int, stop: int) -> float:
        """The bytes that blocks [start, stop) hold while one of them runs: its transients, and offloaded activations.

        The offloaded activations of two blocks are on the device: of the block that computes, and of the one that is
        copied; or those of all microbatches in flight, if these are less.
        """
        transient, left = self._transient.most(start, stop), self._left_bytes
        if left[-1] == 0.0:
            return transient
        in_all = in_flight(self.degrees, rank) * (left[stop] - left[start])
        return transient + min(in_all, PASSING_BLOCKS * self._leaving.most(start, stop))

    @cached_property
    def _transient(self) -> "_MostOf":
        return _MostOf(self.terms.transient_bytes)

    @cached_property
    def _leaving(self) -> "_MostOf":
        return _MostOf(np.diff(self.terms.left_bytes))

    @cached_property
    def _step_s(self) -> list[float]:
        return self.terms.step_s.tolist()  # type: ignore[no-any-return]

    @cached_property
    def _left_bytes(self) -> list[float]:
        return self.terms.left_bytes.tolist()  # type: ignore[no-any-return]


class _MostOf:
    """The maximum over consecutive blocks, from a table: by level, the maximum over 2^level blocks from each one on."""

    def __init__(self, values: FloatArray) -> None:
        self._table = [values]
        while len(self._table[-1]) > 2 ** (len(self._table) - 1):
            half, before = 2 ** (len(self._table) - 1), self._table[-1]
            self._table.append(np.maximum(before[:-half], before[half:]))

    def most(self, start: int, stop: int) -> float:
        """The maximum over blocks [start, stop)."""
        level = (stop - start).bit_length() - 1
        return float(max(self._table[level][start], self._table[level][stop - 2**level]))


def _most_within(values: FloatArray) -> FloatArray:
    """[start, last]: the maximum of the values from one place to another, both included."""
    table = np.where(np.tri(len(values), dtype=bool).T, values[None, :], -inf)
    return np.asarray(np.maximum.accumulate(table, axis=1))
