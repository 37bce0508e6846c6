"""Split: the stages of a configuration, by dynamic programming over the places of its cuts.

T[r][i] is the least, over all ways to split blocks [i, n) among ranks r to p - 1, of the longest batch that one of
their stages causes:

1. T[r][i] = min over j of max(c[r][i, j], T[r + 1][j]), where c is a lower bound on a batch's seconds by a stage of
   blocks [i, j) on rank r (`BatchTimes.by_stage`), and infinite where the stage does not fit.
2. Of all splits with no stage above T[0][0], the one whose stages are most even: the least sum of squares. The last
   ranks are full where cuts are early, the first ones where they are late.

The costs of stages decide between several splits: by their bounds, by their compute alone, and with the time for which
a rank beside a slow link waits. If ranks hold several stages, stages are as even as possible; if a rank then does not
fit, blocks move between neighbouring stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.whole.batch_times import BatchTimes
from pipeplan.planners.whole.budget import BUDGET
from pipeplan.planners.whole.degrees import Degrees
from pipeplan.planners.whole.terms import ReplicaTerms

Split = tuple[int, ...]
"""The stops of stages."""

_ROUNDING = 1e-9

PASSING_BLOCKS = 2
"""Blocks whose activations are on a device at once if they are offloaded."""


def in_flight(degrees: Degrees, rank: int) -> float:
    """Upper bound on a rank's microbatches, in microbatches of all its stages (Narayanan 2021, section 2.2).

    It keeps another one of a stage where every backward overlaps a forward (`Recipe.a2a_overlap`).
    """
    p, v, m, beside = degrees.pipeline, degrees.chunks, degrees.microbatches, int(degrees.recipe.a2a_overlap)
    if v == 1:
        return min(p - rank + beside, m)
    return min(2 * (p - rank - 1) + (v - 1) * p + 1 + beside, m * v) / v


def least_longest(cost_s: FloatArray, preferences: Sequence[FloatArray]) -> tuple[list[Split], float]:
    """Splits of the least longest cost, the one of the least sum of each preference, and this cost; none if every split
    has an infinite cost.

    Places count from the first possible one: cost_s[r, a, b] is that of blocks [r + a, r + 1 + b) on rank r.
    """
    longest_s, stages = cost_s[-1][:, -1], np.arange(len(cost_s))
    for own_s in cost_s[-2::-1]:  # 1.
        longest_s = np.maximum(own_s, longest_s[None, :]).min(axis=1)
    if longest_s[0] == inf:
        return [], inf
    found, possible = list[Split](), cost_s <= longest_s[0] * (1 + _ROUNDING)
    for preference in preferences:  # 2.
        penalty = np.where(possible, preference, inf)
        least, chosen = penalty[-1][:, -1], [np.full(len(cost_s[0]), len(cost_s[0]) - 1)]
        for own in penalty[-2::-1]:
            chosen.append((own + least[None, :]).argmin(axis=1))
            least = (own + least[None, :]).min(axis=1)
        places = accumulate(reversed(chosen), lambda place, best: int(best[place]), initial=0)
        found.append(tuple((1 + stages + np.asarray(list(places)[1:])).tolist()))
    return found, float(longest_s[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Splitter:
    """Splits a configuration's blocks into stages."""

    terms: ReplicaTerms
    degrees: Degrees
    device_bytes: float
    host_bytes: float = inf

    @cached_property
    def several(self) -> tuple[Split, ...]:
        """Splits that fit, the shortest batch first, by its bound on any placement. For ranks with several stages, the
        search may miss some that fit.
        """
        found = {*self._shortest[0], *self._even} if self.degrees.chunks == 1 else {*self._even}
        return tuple(sorted(found, key=lambda stops: (self.times.of(stops), stops)))

    @property
    def least_s(self) -> float:
        """A lower bound on a batch's seconds in any play of any stages; infinite if none fit.

        0 for ranks with several stages, where it is not known.
        """
        return 0.0 if self.degrees.chunks > 1 and self._even else self._shortest[1]

    @cached_property
    def times(self) -> BatchTimes:
        """The bounds of a batch's seconds."""
        return BatchTimes(terms=self.terms, degrees=self.degrees)

    @property
    def most_even(self) -> Split | None:
        """The most even split of the least bottleneck in compute; None where none fits."""
        return self._even[0] if self._even else None

    @cached_property
    def _even(self) -> list[Split]:
        """Splits of the least bottleneck in compute."""
        if self.degrees.chunks == 1:
            return least_longest(self._fitting(self._step_s), self._preferences)[0]
        (even,), _ = least_longest(self._step_s, self._preferences[:1])
        fitting = self._squeezed(even)
        return [] if fitting is None else [fitting]

    def beside_slow_links(self, reached_s: FloatArray) -> list[Split]:
        """The split of the shortest batch if a rank waits for half of the slower link beside it."""
        hops_s = np.diff(reached_s)
        wait_s = np.maximum(np.append(0.0, hops_s), np.append(hops_s, 0.0)) / 2
        cost_s = self.times.by_stage(*self._places, reached_s, wait_s)
        return least_longest(self._fitting(cost_s), self._preferences[:1])[0]

    @cached_property
    def _shortest(self) -> tuple[list[Split], float]:
        """Splits of the shortest batch, by its bound."""
        if self.degrees.chunks > 1:
            return [], inf
        return least_longest(self._fitting(self.times.by_stage(*self._places)), self._preferences)

    @property
    def _preferences(self) -> list[FloatArray]:
        """Even stages, full first ranks, and full last ranks."""
        step_s = self._step_s
        stops = np.arange(len(step_s[0]), dtype=np.float64)
        return [step_s**2, -stops, stops]

    def _fitting(self, cost_s: FloatArray) -> FloatArray:
        return np.where(self.stages_fit, cost_s, inf)

    @cached_property
    def _places(self) -> tuple[IntArray, IntArray]:
        """[stage, place]: where each stage may start, and where it may stop, if all have a block."""
        depth = self.degrees.depth
        starts = np.arange(depth)[:, None] + np.arange(len(self.terms.step_s) - depth)[None, :]
        return starts, starts + 1

    @property
    def _step_s(self) -> FloatArray:
        """[stage, start, stop]: the seconds of a microbatch; infinite where there is no block."""
        return self._between(self.terms.step_s, inf)

    def _between(self, sums: FloatArray, without: float = 0.0) -> FloatArray:
        starts, stops = self._places
        values = sums[stops][:, None, :] - sums[starts][:, :, None]
        return np.where(starts[:, :, None] < stops[:, None, :], values, without)

    @cached_property
    def stages_fit(self) -> BoolArray:
        """[rank, start, stop]: whether the single stage of a rank fits its device and its host, by `_places`."""
        terms, (starts, stops) = self.terms, self._places
        inside = np.maximum(starts[:, :, None], stops[:, None, :] - 1)
        # [start, last]: the largest transient, and the largest block on its way to the host, from one to the other
        later = np.tri(len(terms.transient_bytes), dtype=bool).T
        on_top, leaving = (
            np.maximum.accumulate(np.where(later, each, -inf), axis=1)[starts[:, :, None], inside]
            for each in (terms.transient_bytes, np.diff(terms.left_bytes))
        )
        flight = np.asarray([in_flight(self.degrees, rank) for rank in range(self.degrees.pipeline)])[:, None, None]
        states = (terms.states.fixed_bytes, terms.kept_bytes, terms.left_bytes, terms.states.host_bytes)
        fixed, kept, left, host = map(self._between, states)
        held = fixed + flight * kept + on_top + np.minimum(flight * left, PASSING_BLOCKS * leaving)
        fits = (held <= self.device_bytes) & (host + flight * left <= self.host_bytes)
        return np.asarray(fits & (starts[:, :, None] < stops[:, None, :]))

    def _squeezed(self, stops: Split) -> Split | None:
        """The same stages if all ranks fit, or others after some blocks have moved; None if that does not help.

        Each time, a cut moves by the block after which the fullest rank holds least.
        """
        most = max(self.by_rank(stops))
        if sum(self.by_rank(stops)) > self.device_bytes * self.degrees.pipeline:
            return None
        for _ in range(BUDGET.squeezing_moves):
            if most <= self.device_bytes:
                break
            held, stops = min((max(self.by_rank(other)), other) for other in (stops, *moved_by_a_block(stops)))
            if held >= most:
                return None
            most = held
        return stops if most <= self.device_bytes else None

    def by_rank(self, stops: Sequence[int]) -> list[float]:
        """The bytes that every rank holds."""
        return self._summed(self.held_bytes(stops))

    def hosts_by_rank(self, stops: Sequence[int]) -> list[float]:
        """The bytes that every rank has on its host."""
        return self._summed(self.held_by_hosts(stops))

    def _summed(self, by_stage: FloatArray) -> list[float]:
        by_rank = by_stage.reshape(-1, self.degrees.pipeline).sum(axis=0)
        return by_rank.tolist()  # type: ignore[no-any-return]

    def held_bytes(self, stops: Sequence[int]) -> FloatArray:
        """The bytes that each stage's device holds: states, microbatches in flight, and the largest block's transient
        bytes.

        If ranks hold several stages, each has its share of the rank's microbatches; transient bytes count once.
        """
        terms, flight, starts, ends = self.terms, *self._stages(stops)
        states = terms.states.fixed_bytes[ends] - terms.states.fixed_bytes[starts]
        held: FloatArray = states + flight * (terms.kept_bytes[ends] - terms.kept_bytes[starts])
        p = self.degrees.pipeline
        held[:p] += self.on_top_bytes(stops).reshape(-1, p).max(axis=0)
        return held

    def on_top_bytes(self, stops: Sequence[int]) -> FloatArray:
        """The bytes that each stage holds while a block runs: its transients, and offloaded activations.

        The offloaded activations of two blocks are on the device: of the block that computes, and of the one that is
        copied; or those of all microbatches in flight, if these are less.
        """
        terms, flight, starts, ends = self.terms, *self._stages(stops)
        left = terms.left_bytes[ends] - terms.left_bytes[starts]
        passing = PASSING_BLOCKS * np.maximum.reduceat(np.diff(terms.left_bytes), starts)
        return np.asarray(np.maximum.reduceat(terms.transient_bytes, starts) + np.minimum(flight * left, passing))

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


def moved_by_a_block(stops: Split) -> Iterator[Split]:
    """The splits in which one cut is a block earlier or later; no stage is empty."""
    for place, (before, stop, after) in enumerate(zip((0, *stops), stops, stops[1:], strict=False)):
        for moved in (stop - 1, stop + 1):
            if before < moved < after:
                yield (*stops[:place], moved, *stops[place + 1 :])
