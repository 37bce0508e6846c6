"""Splits: all splits of a configuration whose bounds let a play be fast enough, counted and listed.

The bound of a split is that of its slowest stage, and a stage's time depends on its place alone. So the splits within a
limit are the paths from the first block to the last over stages within the limit:

    N(s, a) = sum over stops b of N(s + 1, b) where stage s, of the blocks [a, b), fits and is within the limit

They are counted from the last stage to the first. If only a few of very many are within the limit, they are listed
without the others. The fastest slowest stage is found in the same way.

A microbatch's round trip through all stages, and the traffic of the ports, depend on the whole split. `WholeSplits`
bounds many splits by these at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.auto.wiring import Wiring
from pipeplan.planners.two_bw.places import Bands
from pipeplan.planners.two_bw.terms import PipelineTerms

_ROUNDING = 1e-9

LONGEST_S = float(np.finfo(np.float64).max)
"""The limit that leaves out only what does not fit."""

MOST_ROWS = 1000
"""Up to this number, splits are bounded as a whole: a millisecond."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitsWithin:
    """The splits of a shape that fit and take at most `limit_s` a batch.

    `least_s` is [stage, start, length - 1]: a lower bound on the stage's seconds; infinite if it does not fit.
    Of splits that are given as rows of stops, `whole_s` bounds the seconds a batch, and `sent_s` is the time of all
    transfers of a microbatch.
    """

    least_s: FloatArray
    limit_s: float
    whole_s: Callable[[IntArray], FloatArray]
    sent_s: Callable[[IntArray], FloatArray]
    batch_size: int

    @cached_property
    def count(self) -> float:
        """Their number. Of more than `MOST_ROWS` only the stages are bounded."""
        ways = float(self._ways[0, 0])
        return float(len(self._rows)) if ways <= MOST_ROWS else ways

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(tuple, self._rows.tolist())

    def highest(self, count: int) -> Sequence[tuple[float, tuple[int, ...]]]:
        """At most `count` splits with the highest bounds, among the `MOST_ROWS` whose slowest stages are the fastest:
        a bisection over limits finds these. Ties prefer the split that sends the fewest bytes.
        """
        limits_s = np.unique(self.least_s[(self.least_s >= self.slowest_s) & (self.least_s <= self.limit_s)])
        if not len(limits_s):
            return ()
        enough, too_many = 0, len(limits_s)
        while too_many - enough > 1:
            middle = (enough + too_many) // 2
            if replace(self, limit_s=float(limits_s[middle]))._ways[0, 0] <= MOST_ROWS:
                enough = middle
            else:
                too_many = middle
        some = replace(self, limit_s=float(limits_s[enough]))._first(MOST_ROWS)
        whole_s = self.whole_s(some)
        order = np.lexsort((self.sent_s(some), whole_s.astype(np.float32)))[:count]  # equal but for their rounding
        order = order[whole_s[order] <= self.limit_s]
        with np.errstate(divide="ignore"):
            rates = self.batch_size / (whole_s[order] * (1 - _ROUNDING))
        return [(rate, tuple(stops)) for rate, stops in zip(rates.tolist(), some[order].tolist(), strict=True)]

    @cached_property
    def _rows(self) -> IntArray:
        """[split, stage]: where their stages end."""
        every = self._first(int(self._ways[0, 0]))
        return every[self.whole_s(every) <= self.limit_s]

    def _first(self, most: int) -> IntArray:
        """[split, stage]: the stops of at most `most` splits whose stages are within the limit."""
        stops, lengths = np.zeros((1, 1), dtype=np.int64), 1 + np.arange(self.least_s.shape[2])
        for stage, stage_s in enumerate(self.least_s):
            starts = stops[:, -1]
            within = (stage_s[starts] <= self.limit_s) & (self._ways[stage + 1][starts[:, None] + lengths] > 0)
            before, length = (each[:most] for each in np.nonzero(within))
            stops = np.column_stack((stops[before], starts[before] + lengths[length]))
        return stops[:, 1:]

    @cached_property
    def slowest_s(self) -> float:
        """Lower bound on the slowest stage's seconds a batch, over all splits; infinite if none fits."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeSplits:
    """Bounds of whole splits of a shape on a placement. `tied_s`: how long its first and last stage sum gradients of
    shared weights; with a flush, a batch ends with that.
    """

    terms: PipelineTerms
    wiring: Wiring
    exchange_factor: float
    tied_s: float

    def least_s(self, stops: IntArray, busy_s: FloatArray, way_s: FloatArray) -> FloatArray:
        """The least seconds a batch of each row of stops (`bound`, 1 to 4, 6 and 10).

        busy_s[row, stage] are the least seconds of a stage, way_s[row, stage] the part of its compute for which a
        microbatch waits.
        """
        if not len(stops):
            return np.zeros(0)
        chain, shape, wiring = self.terms.chain, self.terms.shape, self.wiring
        m, depth = shape.microbatches, shape.depth
        sent_bytes = chain.output_bytes[stops[:, :-1]]
        round_trip_s = way_s.copy()
        round_trip_s[:, :-1] += 2.0 * wiring.latencies_s + sent_bytes * wiring.ports.hop_s_per_byte
        onwards_s = np.cumsum(round_trip_s[:, ::-1], axis=1)[:, ::-1]
        if not shape.laws.pipelined:
            return np.asarray(np.maximum(busy_s.max(axis=1), m * onwards_s[:, 0]))
        held = [shape.laws.in_flight(depth=depth, stage=stage, microbatches=m) for stage in range(depth)]
        window_s = m * onwards_s / np.asarray(held)
        if shape.laws.flushes:
            window_s = np.maximum(window_s, m * way_s) + onwards_s[:, :1] - onwards_s + self.tied_s
        elif held[-1] == 1:  # the last stage computes a batch between two sums of shared weights (`bound`, 10)
            window_s = np.maximum(window_s, m * way_s[:, -1:] + self.tied_s)
        ports_s = m * (sent_bytes @ wiring.ports.sent_s_per_byte.T)
        if shape.width > 1:
            starts = np.concatenate((np.zeros_like(stops[:, :1]), stops[:, :-1]), axis=1)
            weight_bytes = self.exchange_factor * (chain.weight_bytes[stops] - chain.weight_bytes[starts])
            ports_s += weight_bytes @ wiring.ports.exchanged_s_per_byte.T
        return np.asarray(
            np.maximum.reduce([busy_s.max(axis=1), window_s.max(axis=1), ports_s.max(axis=1, initial=0.0)])
        )


def whole_splits(model: SearchedModel, terms: PipelineTerms, wiring: Wiring) -> WholeSplits:
    """The bounds of a shape's splits."""
    return WholeSplits(terms=terms, wiring=wiring, exchange_factor=model.exchange_factor, tied_s=model.tied_s(wiring))


def splits_above(rate: float, model: SearchedModel, terms: PipelineTerms, wiring: Wiring) -> SplitsWithin:
    """The splits of a shape that may play more than `rate` samples a second."""
    shape = terms.shape
    limit_s = LONGEST_S if rate <= 0 else shape.batch_size / (rate * (1 - _ROUNDING))
    least_s, way_s = _tables(model, terms, model.tied_s(wiring))
    whole = whole_splits(model, terms, wiring)

    def whole_s(stops: IntArray) -> FloatArray:
        starts = np.concatenate((np.zeros_like(stops[:, :1]), stops[:, :-1]), axis=1)
        at = np.arange(shape.depth), starts, stops - starts - 1
        return whole.least_s(stops, least_s[at], way_s[at])

    def sent_s(stops: IntArray) -> FloatArray:
        return np.asarray((terms.chain.output_bytes[stops[:, :-1]] * wiring.ports.hop_s_per_byte).sum(axis=1))

    return SplitsWithin(least_s=least_s, limit_s=limit_s, whole_s=whole_s, sent_s=sent_s, batch_size=shape.batch_size)


def _tables(model: SearchedModel, terms: PipelineTerms, tied_s: float) -> tuple[FloatArray, FloatArray]:
    """[stage, start, length - 1]: the least seconds a batch of a stage, in the mode that the closed form chooses, and
    the part of its compute that a microbatch waits for.

    They are the largest of its compute (with a flush, after the time to reach it and before the sum of shared weights:
    `bound`, 1 and 3), its exchange, and its sends. They are infinite if the stage does not fit, or ends beyond the last
    block.
    """
    shape, blocks, chain = terms.shape, terms.chain.blocks, terms.chain
    reach, depth, m = blocks - shape.depth + 1, shape.depth, shape.microbatches
    firsts = np.zeros(depth, dtype=np.int64)
    at = Bands(slice(0, depth), firsts, firsts + 1, blocks, reach, blocks)
    starts = np.arange(blocks)[:, None]
    beyond = starts + 1 + np.arange(reach) > blocks
    stops = np.minimum(starts + 1 + np.arange(reach), blocks)
    way_s = model.sums(shape.schedule, shape.microbatch_size, shape.recompute).way_s
    found, chosen_s, ways_s = (np.full((depth, blocks, reach), inf) for _ in range(3))
    for mode in shape.modes:
        time_s = np.where(terms.mode_fits(mode, at) & ~beyond, terms.mode_s(mode, at), inf)
        own = model.sums(shape.schedule, shape.microbatch_size, mode)
        own_s, least_s = own.way_s[stops] - own.way_s[starts], m * (own.compute_s[stops] - own.compute_s[starts])
        if not shape.laws.pipelined:
            least_s = np.zeros_like(own_s)
        elif shape.laws.flushes:
            least_s = np.maximum(least_s, way_s[starts] + m * own_s + tied_s)
        shorter = time_s < chosen_s
        found, ways_s = np.where(shorter, least_s, found), np.where(shorter, own_s, ways_s)
        chosen_s = np.minimum(chosen_s, time_s)
    if shape.laws.pipelined:
        sent_s = m * chain.output_bytes[stops] / terms.links.edges[:, None, None] if depth > 1 else np.zeros((0, 1, 1))
        found[:-1] = np.maximum(found[:-1], sent_s)
        if shape.width > 1:
            weight_bytes = (chain.weight_bytes[stops] - chain.weight_bytes[starts]) * model.exchange_factor
            found = np.maximum(found, model.exchanged_s_per_byte(terms.links)[:, None, None] * weight_bytes)
    return found, ways_s
