"""Batch times: lower bounds on a batch's seconds in any play, for given stages and for any stages.

These are bounds of `planners.bound` for an engine that exchanges after the backward, from sums over blocks: with m
microbatches a batch, and a stage of blocks [i, j) on rank s of p, three terms that `by_stage` numbers. Ranks also take
turns (`planners.bound`, 8 and 9), which bounds only given stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray, IntArray, sums
from pipeplan.planners.bound import of_stages_s, turns_s, within_s
from pipeplan.planners.whole.degrees import Degrees
from pipeplan.planners.whole.exchanged import least_exchange_s
from pipeplan.planners.whole.terms import ReplicaTerms


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchTimes:
    """The bounds of a configuration's batch."""

    terms: ReplicaTerms
    degrees: Degrees

    def of(self, stops: Sequence[int], reached_s: FloatArray | None = None) -> float:
        """A lower bound on the seconds of a batch with these stages.

        reached_s[p] are the hops before each rank in both directions, if its placement is known.
        """
        if self.degrees.pipeline == 1:
            return self._bounded_s(stops, reached_s)
        m, v, ends = self.degrees.microbatches, self.degrees.chunks, np.asarray(stops)
        hops_s = self._hops_s if reached_s is None else reached_s
        own_s, first_s = (np.diff(each[ends], prepend=0.0) for each in (self.terms.step_s, self.terms.forward_s))
        if v == 1:
            turned_s = turns_s(within_s(own_s), first_s, hops_s, m)
        else:
            whole_s = self.terms.step_s[-1] + v * float(hops_s[-1]) + (v - 1) * self._hop_s
            turned_s = of_stages_s(first_s.reshape(v, -1), own_s.reshape(v, -1), hops_s, whole_s, m)
        end_s = float(np.diff(self.end_s[ends], prepend=0.0).reshape(v, -1)[:, 0].sum())
        return max(self._bounded_s(stops, reached_s), turned_s + end_s)

    def _bounded_s(self, stops: Sequence[int], reached_s: FloatArray | None) -> float:
        p, m, ends = self.degrees.pipeline, self.degrees.microbatches, np.asarray(stops)
        starts = np.append(0, ends[:-1])
        computed, ended = (
            (each[ends] - each[starts]).reshape(-1, p).sum(axis=0) for each in (self.terms.step_s, self.end_s)
        )
        least_s = float((m * computed + ended).max())
        if p > 1:
            # The first of a rank's stages is reached first, and the last to send a gradient back.
            hops_s = self._hops_s if reached_s is None else reached_s
            before_s, windows_s = self.terms.step_s[starts[:p]] + hops_s, m * computed
            if self.degrees.chunks == 1:
                rounds_s = m * (self.terms.step_s[-1] + hops_s[-1] - before_s) / np.minimum(np.arange(p, 0, -1), m)
                windows_s = np.maximum(windows_s, rounds_s)
            after_s = float(ended[0])
            least_s = max(least_s, float((before_s + windows_s)[1:].max()) + after_s, float(windows_s[0]))
        return least_s

    def by_stage(
        self, starts: IntArray, stops: IntArray, reached_s: FloatArray | None = None, wait_s: FloatArray | None = None
    ) -> FloatArray:
        """Lower bounds on a batch's seconds by the single stage of a rank, between places that broadcast; ranks come
        first.

        A rank waits for `wait_s` with every microbatch.
        """
        m, p, step_s, alone_s = self.degrees.microbatches, self.degrees.pipeline, self.terms.step_s, self.alone_s
        waits_s = m * (np.zeros(p) if wait_s is None else wait_s)[:, None, None]
        # 1. m S(i, j) + E(i, j): the stage computes all microbatches (S), exchanges and updates (E).
        computed_s = alone_s[stops] - alone_s[starts] + waits_s
        if p == 1:
            return np.asarray(computed_s)
        # 2. S(0, i) + s h + m S(i, j) + e: the first microbatch passes the earlier blocks, and the last one comes
        #    back through them; then the first rank exchanges and updates (e). h is a hop in both directions.
        hops_s, ranks = self._hops_s if reached_s is None else reached_s, np.arange(p)[:, None, None]
        hops_s = hops_s[:, None, None]
        before_s = step_s[starts] + hops_s + (ranks > 0) * float(self.end_s[1])
        window_s = m * (step_s[stops] - step_s[starts]) + waits_s
        # 3. S(0, i) + s h + m R / k + e, R = S(i, n) + (p - 1 - s) h, k = min(p - s, m) in flight (Little 1961)
        rounds_s = m * (step_s[-1] - step_s[starts] + hops_s[-1] - hops_s) / np.minimum(p - ranks, m)
        return np.asarray(np.maximum(computed_s, before_s + np.maximum(window_s, rounds_s)))

    @cached_property
    def alone_s(self) -> FloatArray:
        """Sums of the seconds in which a stage's blocks do a batch's work by themselves (1)."""
        alone_s = self.degrees.microbatches * self.terms.step_s + self.end_s
        return np.asarray(np.maximum.accumulate(alone_s))  # they grow, but for rounding

    @cached_property
    def end_s(self) -> FloatArray:
        """Sums of the least seconds in which blocks exchange and update, over all placements."""
        at, states = self.terms, self.terms.states
        update_s: FloatArray = states.update_s
        exchanged = np.floor(np.diff(states.exchanged_bytes))  # plans have whole bytes a block
        if at.terms.engine.overlaps or exchanged.sum() <= 0:
            return update_s
        # Seconds are concave in bytes: a part takes at least its share of the whole's seconds.
        share_s = least_exchange_s(at, at.terms.problem.cluster) / float(exchanged.sum())
        return update_s + sums(share_s * exchanged)

    @cached_property
    def _hops_s(self) -> FloatArray:
        """The least time of the hops before each rank in both directions, over all placements."""
        return np.asarray(self._hop_s * np.arange(self.degrees.pipeline))

    @property
    def _hop_s(self) -> float:
        return self.terms.terms.hop_s if self.degrees.pipeline > 1 else 0.0
