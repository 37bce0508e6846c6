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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.spaces import moved_by_a_block
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

    Places count from the first possible one: cost_s[r, a, k] is that of blocks [r + a, r + a + 1 + k) on rank r. Longer
    stages have no entry.
    """
    stages, places, reach = cost_s.shape
    ends = np.where(np.arange(places) == places - 1, 0.0, inf)

    def following(after: FloatArray) -> FloatArray:
        """[start, length - 1]: the entry of the place where a stage ends."""
        return sliding_window_view(np.append(after, np.full(reach - 1, inf)), reach)

    longest_s = np.where(ends == 0.0, -inf, inf)
    for own_s in cost_s[::-1]:  # 1.
        longest_s = np.maximum(own_s, following(longest_s)).min(axis=1)
    if longest_s[0] == inf:
        return [], inf
    found, possible = list[Split](), cost_s <= longest_s[0] * (1 + _ROUNDING)
    for preference in preferences:  # 2.
        least, chosen = ends, list[IntArray]()
        for own in np.where(possible, preference, inf)[::-1]:
            sums = own + following(least)
            chosen.append(np.arange(places) + sums.argmin(axis=1))
            least = sums.min(axis=1)
        stops = accumulate(reversed(chosen), lambda place, best: int(best[place]), initial=0)
        found.append(tuple((1 + np.arange(stages) + np.asarray(list(stops)[1:])).tolist()))
    return found, float(longest_s[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Splitter:
    """Splits a configuration's blocks into stages."""

    terms: ReplicaTerms
    degrees: Degrees
    device_bytes: float
    host_bytes: float = inf
    _fits: dict[int, BoolArray] = field(default_factory=dict)

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
            return self._least(self._step_s, preferences=3)[0]
        (even,), _ = self._least(self._step_s)
        fitting = self._squeezed(even)
        return [] if fitting is None else [fitting]

    def beside_slow_links(self, reached_s: FloatArray) -> list[Split]:
        """The split of the shortest batch if a rank waits for half of the slower link beside it."""
        hops_s = np.diff(reached_s)
        wait_s = np.maximum(np.append(0.0, hops_s), np.append(hops_s, 0.0)) / 2
        return self._least(lambda starts, stops: self.times.by_stage(starts, stops, reached_s, wait_s))[0]

    @cached_property
    def _shortest(self) -> tuple[list[Split], float]:
        """Splits of the shortest batch, by its bound."""
        return self._least(self.times.by_stage, preferences=3) if self.degrees.chunks == 1 else ([], inf)

    def _least(
        self, cost_s: Callable[[IntArray, IntArray], FloatArray], preferences: int = 1
    ) -> tuple[list[Split], float]:
        """Fitting splits of the least longest cost, which grows with a stage, and this cost: even stages, full first
        ranks, and full last ranks. Of ranks with several stages, any splits.

        First, stages have at most twice an equal share of the blocks: tables of long models are large. If a longer one
        may be better, as far as its first blocks show, twice as many follow.
        """
        depth, blocks = self.degrees.depth, len(self.terms.step_s) - 1
        places = blocks + 1 - depth
        reach = min(2 * -(-blocks // depth), places)
        while True:
            starts, stops = self._places(reach)
            costs_s = cost_s(starts, stops)
            if self.degrees.chunks == 1:
                costs_s = np.where(self.stages_fit(reach), costs_s, inf)
            ends = stops.astype(np.float64)
            every = [self._step_s(starts, stops) ** 2, -ends, ends]
            found, longest_s = least_longest(costs_s, every[:preferences])
            longer_s = costs_s[:, : places - reach, -1].min(initial=inf)
            if longer_s == inf or longer_s > longest_s * (1 + _ROUNDING):
                return found, longest_s
            reach = min(2 * reach, places)

    def _places(self, reach: int) -> tuple[IntArray, IntArray]:
        """[stage, place] and [stage, place, length - 1]: where each stage may start, and where it stops."""
        depth, blocks = self.degrees.depth, len(self.terms.step_s) - 1
        starts = (np.arange(depth)[:, None] + np.arange(blocks + 1 - depth))[:, :, None]
        return starts, np.minimum(starts + 1 + np.arange(reach), blocks)

    def _step_s(self, starts: IntArray, stops: IntArray) -> FloatArray:
        """The seconds of a microbatch."""
        return np.asarray(self.terms.step_s[stops] - self.terms.step_s[starts])

    def stages_fit(self, reach: int) -> BoolArray:
        """[rank, place, length - 1]: whether the single stage of a rank fits its device and its host."""
        if reach not in self._fits:
            terms, (starts, stops) = self.terms, self._places(reach)
            # [start, last]: the largest transient, and the largest block on its way to the host, from one to the other
            later = np.tri(len(terms.transient_bytes), dtype=bool).T
            on_top, leaving = (
                np.maximum.accumulate(np.where(later, each, -inf), axis=1)[starts, stops - 1]
                for each in (terms.transient_bytes, np.diff(terms.left_bytes))
            )
            flight = np.asarray([in_flight(self.degrees, rank) for rank in range(self.degrees.pipeline)])[:, None, None]
            states = (terms.states.fixed_bytes, terms.kept_bytes, terms.left_bytes, terms.states.host_bytes)
            fixed, kept, left, host = (sums[stops] - sums[starts] for sums in states)
            held = fixed + flight * kept + on_top + np.minimum(flight * left, PASSING_BLOCKS * leaving)
            fits = (held <= self.device_bytes) & (host + flight * left <= self.host_bytes)
            self._fits[reach] = np.asarray(fits)
        return self._fits[reach]

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
