"""Splits: all splits of a configuration whose bounds let a play be fast enough, counted and listed.

The bound of a split is that of its slowest stage, and a stage's time depends on its place alone. So the splits within a
limit are the paths from the first block to the last over stages within the limit:

    N(s, a) = sum over stops b of N(s + 1, b) where stage s, of the blocks [a, b), fits and is within the limit

They are counted from the last stage to the first. If only a few of very many are within the limit, they are listed
without the others. The most even split is found in the same way, with the slowest stage, and then the sum of squares,
in place of N.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.two_bw.places import Bands
from pipeplan.planners.two_bw.terms import PipelineTerms

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitsWithin:
    """The splits of a shape that fit and in which each stage takes at most `limit_s` a batch.

    `least_s` is [stage, start, length - 1]: a lower bound on the stage's seconds; infinite if it does not fit.
    """

    least_s: FloatArray
    limit_s: float

    @property
    def count(self) -> float:
        """Their number."""
        return float(self._ways[0, 0])

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return self._after(0, 0) if self.count else iter(())

    def _after(self, stage: int, start: int) -> Iterator[tuple[int, ...]]:
        """The stops of the stages from this one on, which begins here."""
        depth, blocks = len(self.least_s), self.least_s.shape[1]
        if stage == depth:
            yield ()
            return
        stops = start + 1 + np.flatnonzero(self.least_s[stage, start] <= self.limit_s)
        for stop in stops[stops <= blocks].tolist():
            if self._ways[stage + 1, stop]:
                yield from ((stop, *rest) for rest in self._after(stage + 1, stop))

    def highest(self, count: int) -> Iterator[tuple[int, ...]]:
        """At most so many of those with the highest bounds, by a bisection over limits."""
        limits_s = np.unique(self.least_s[(self.least_s >= self.slowest_s) & (self.least_s <= self.limit_s)])
        if not len(limits_s):
            return iter(())
        enough, too_many = 0, len(limits_s)
        while too_many - enough > 1:
            middle = (enough + too_many) // 2
            if replace(self, limit_s=float(limits_s[middle])).count <= count:
                enough = middle
            else:
                too_many = middle
        return islice(replace(self, limit_s=float(limits_s[enough])), count)

    @cached_property
    def slowest_s(self) -> float:
        """The least seconds a batch of the slowest stage, however the blocks are split; infinite if none fits."""
        depth, blocks, _ = self.least_s.shape
        onwards_s = np.append(np.full(blocks, inf), [0.0, inf])
        for stage in range(depth - 1, -1, -1):
            onwards_s[:blocks] = np.maximum(self.least_s[stage], onwards_s[self._stops]).min(axis=1)
            onwards_s[blocks:] = inf
        return float(onwards_s[0])

    @cached_property
    def _stops(self) -> IntArray:
        """[start, length - 1]: where a stage ends; beyond the last block, one after it."""
        _, blocks, reach = self.least_s.shape
        return np.asarray(np.minimum(1 + np.arange(blocks)[:, None] + np.arange(reach), blocks + 1))

    def most_even(self) -> tuple[int, ...] | None:
        """The split whose slowest stage is the fastest; of several the one with the least squares. None if none fits.

        Waiting does not count: transfers and exchanges run beside the compute, not after it.
        """
        slowest_s, stops = self.slowest_s, self._stops
        depth, blocks, _ = self.least_s.shape
        if slowest_s == inf:
            return None
        squares = np.where(self.least_s <= slowest_s, np.square(self.least_s), inf)
        choices: list[IntArray] = []
        onwards = np.append(np.full(blocks, inf), [0.0, inf])
        for stage in range(depth - 1, -1, -1):
            sums = squares[stage] + onwards[stops]
            choices.insert(0, sums.argmin(axis=1))
            onwards[:blocks] = sums.min(axis=1)
            onwards[blocks:] = inf
        found, start = list[int](), 0
        for choice in choices:
            start += 1 + int(choice[start])
            found.append(start)
        return tuple(found)

    @cached_property
    def _ways(self) -> FloatArray:
        """N, by stage and start."""
        depth, blocks, reach = self.least_s.shape
        ways = np.zeros((depth + 1, blocks + reach + 1))
        ways[depth, blocks] = 1.0
        stops = 1 + np.arange(blocks)[:, None] + np.arange(reach)
        for stage in range(depth - 1, -1, -1):
            ways[stage, :blocks] = ((self.least_s[stage] <= self.limit_s) * ways[stage + 1][stops]).sum(axis=1)
        return ways


def splits_above(rate: float, model: SearchedModel, terms: PipelineTerms) -> SplitsWithin:
    """The splits of a shape whose stages may all be fast enough for more than so many samples a second."""
    shape = terms.shape
    limit_s = inf if rate <= 0 else shape.batch_size / (rate * (1 - _ROUNDING))
    return SplitsWithin(least_s=_least_s(model, terms), limit_s=limit_s)


def _least_s(model: SearchedModel, terms: PipelineTerms) -> FloatArray:
    """[stage, start, length - 1]: the least seconds a batch of a stage, in the mode that the closed form chooses.

    They are the largest of its compute (with a flush, after the time to reach it: `bound`, 1 and 3), its exchange, and
    its sends. They are infinite if the stage does not fit, or ends beyond the last block.
    """
    shape, blocks, chain = terms.shape, terms.chain.blocks, terms.chain
    reach, depth, m = blocks - shape.depth + 1, shape.depth, shape.microbatches
    firsts = np.zeros(depth, dtype=np.int64)
    at = Bands(slice(0, depth), firsts, firsts + 1, blocks, reach, blocks)
    starts = np.arange(blocks)[:, None]
    beyond = starts + 1 + np.arange(reach) > blocks
    stops = np.minimum(starts + 1 + np.arange(reach), blocks)
    if not shape.laws.pipelined:
        fits = np.logical_or.reduce([terms.mode_fits(mode, at) for mode in shape.modes])
        return np.where(fits & ~beyond, 0.0, inf)

    way_s = model.sums(shape.schedule, shape.microbatch_size, shape.recompute).way_s
    found, chosen_s = np.full((depth, blocks, reach), inf), np.full((depth, blocks, reach), inf)
    for mode in shape.modes:
        time_s = np.where(terms.mode_fits(mode, at) & ~beyond, terms.mode_s(mode, at), inf)
        own = model.sums(shape.schedule, shape.microbatch_size, mode)
        least_s = m * (own.compute_s[stops] - own.compute_s[starts])
        if shape.laws.flushes:
            least_s = np.maximum(least_s, way_s[starts] + m * (own.way_s[stops] - own.way_s[starts]))
        found = np.where(time_s < chosen_s, least_s, found)
        chosen_s = np.minimum(chosen_s, time_s)
    sent_s = m * chain.output_bytes[stops] / terms.links.edges[:, None, None] if depth > 1 else np.zeros((0, 1, 1))
    found[:-1] = np.maximum(found[:-1], sent_s)
    if shape.width > 1:
        weight_bytes = (chain.weight_bytes[stops] - chain.weight_bytes[starts]) * model.exchange_factor
        found = np.maximum(found, model.exchanged_s_per_byte(terms.links)[:, None, None] * weight_bytes)
    return found
