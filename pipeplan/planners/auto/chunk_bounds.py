"""Chunk bounds: rates that no play of ranks with several stages exceeds, for given stages or for any.

They are those of `planners.bound` that follow from the cuts alone, for many splits at once and without their plans. A
transfer from the last rank of a loop to its first counts only where these are neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.memory import held_by
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.auto.wiring import Wiring
from pipeplan.planners.interleaved.shape import ChunkedShape

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkBounds:
    """The bounds of a shape on a placement, in samples a second."""

    model: SearchedModel
    shape: ChunkedShape
    wiring: Wiring

    def most(self, stops: Sequence[int]) -> float:
        """Upper bound on the rate of any play with these stages."""
        return float(self.most_of_each(np.asarray([stops]))[0])

    def most_of_each(self, stops: IntArray) -> FloatArray:
        """The same for each row of stops: `bound`, 1 to 3, 5 and 6, without the rest of the exchanges."""
        shape, m = self.shape, self.shape.microbatches
        sums = self.model.sums(shape.schedule, shape.microbatch_size, shape.recompute)
        chain = self.model.evaluator.chain(shape.microbatch_size, shape.depth)
        starts = np.concatenate((np.zeros_like(stops[:, :1]), stops[:, :-1]), axis=1)
        by_rank = np.asarray([shape.stages_of(rank) for rank in range(shape.ranks)])
        computed_s = (sums.compute_s[stops] - sums.compute_s[starts])[:, by_rank].sum(axis=2)
        way_s = sums.way_s[stops] - sums.way_s[starts]
        round_trip_s, ports_s = way_s.copy(), np.zeros((len(stops), 1))
        if shape.ranks > 1:
            stages, edges = crossings(shape)
            ports, sent_bytes = self.wiring.ports, chain.output_bytes[stops[:, stages]]
            round_trip_s[:, stages] += 2.0 * self.wiring.latencies_s[edges] + sent_bytes * ports.hop_s_per_byte[edges]
            ports_s = m * (sent_bytes @ ports.sent_s_per_byte[:, edges].T)
            if shape.width > 1:
                weight_bytes = (chain.weight_bytes[stops] - chain.weight_bytes[starts])[:, by_rank].sum(axis=2)
                ports_s += self.model.exchange_factor * weight_bytes @ ports.exchanged_s_per_byte.T
        onwards_s = np.cumsum(round_trip_s[:, ::-1], axis=1)[:, ::-1]
        before_s = onwards_s[:, :1] - onwards_s
        stage_s = before_s + np.maximum(m * way_s, m * onwards_s / in_flight(shape))
        rank_s = before_s[:, : shape.ranks] + m * way_s[:, by_rank].sum(axis=2)
        every = (m * computed_s, stage_s + self._tied_s, rank_s + self._tied_s, ports_s)
        least_s = np.maximum.reduce([each.max(axis=1, initial=0.0) for each in every])
        with np.errstate(divide="ignore"):
            rates = shape.batch_size / (least_s * (1 - _ROUNDING))
        return np.asarray(np.minimum(rates, self.most_by_exchanges()))

    def most_by_exchanges(self) -> float:
        """Upper bound over all stages, from the exchanges: among replicas, or of shared weights."""
        shape = self.shape
        weight_bytes = self.model.sums(shape.schedule, shape.microbatch_size, shape.recompute).exchanged_bytes
        ring_s = weight_bytes * self.wiring.ring_s_per_byte if shape.width > 1 else 0.0
        tied_s = self._tied_s
        return samples_per_s(shape, max(ring_s, mean_window_s(self.model, shape) + tied_s if tied_s else 0.0))

    def most_by_transfers(self) -> float:
        """The same by their transfers (`bound`, 2 and 6): stages end at different boundaries, and those of the fewest
        bytes pass where a byte takes longest.
        """
        shape, m, ports = self.shape, self.shape.microbatches, self.wiring.ports
        if shape.ranks == 1:
            return inf
        stages, edges = crossings(shape)
        way_s = self.model.sums(shape.schedule, shape.microbatch_size, shape.recompute).way_s[-1]
        few_bytes = np.sort(self.model.evaluator.chain(shape.microbatch_size).output_bytes[1:-1])[: len(stages)]
        sent_s_per_byte = np.sort(ports.sent_s_per_byte[:, edges], axis=1)[:, ::-1]
        hops_s = 2.0 * self.wiring.latencies_s[edges].sum() + few_bytes @ np.sort(ports.hop_s_per_byte[edges])[::-1]
        round_s = m * float(way_s + hops_s) / int(in_flight(shape)[0])
        return samples_per_s(
            shape, max(round_s + self._tied_s, m * float((sent_s_per_byte @ few_bytes).max(initial=0.0)))
        )

    @property
    def _tied_s(self) -> float:
        """How long the first and the last stage sum gradients of shared weights, after the last backward of a batch.
        In a V, both are on one rank.
        """
        return 0.0 if self.shape.laws.v_shaped else self.model.tied_s(self.wiring)


def mean_window_s(model: SearchedModel, shape: ChunkedShape) -> float:
    """The least seconds from a batch's first forward to its last backward, as a mean over ranks, for any
    stages: a rank computes its share of the model, and a microbatch reaches it through a block on each rank before it.
    """
    way_s = model.sums(shape.schedule, shape.microbatch_size, shape.recompute).way_s
    fill_s = float(np.diff(way_s).min()) * (shape.ranks - 1) / 2
    return shape.microbatches * float(way_s[-1]) / shape.ranks + fill_s


def most_anywhere(model: SearchedModel, shape: ChunkedShape) -> float:
    """Upper bound on samples a second of all plays, on any placement, with any stages and chunks."""
    work_s = model.sums(shape.schedule, shape.microbatch_size, shape.recompute).compute_s
    m, ranks = shape.microbatches, shape.ranks
    longest = np.sort(np.diff(work_s))[::-1]
    sums_s = np.append(0.0, np.cumsum(longest))
    many = np.arange(1, len(longest) + 1)
    block_s = float((sums_s[many] - sums_s[many - -(-many // ranks)]).max())
    least_s = max(m * work_s[-1] / ranks, m * block_s, mean_window_s(model, shape))
    return samples_per_s(shape, float(least_s))


def samples_per_s(shape: ChunkedShape, batch_s: float) -> float:
    """Samples a second at `batch_s` seconds a batch, slightly above the exact value; infinite for 0."""
    return shape.batch_size / (batch_s * (1 - _ROUNDING)) if batch_s > 0 else inf


@lru_cache(maxsize=1024)
def crossings(shape: ChunkedShape) -> tuple[IntArray, IntArray]:
    """The stages that send to a neighbouring rank, and the boundary between ranks that each of them crosses."""
    owners = np.zeros(shape.depth, dtype=np.int64)
    for rank in range(shape.ranks):
        owners[list(shape.stages_of(rank))] = rank
    stages = np.flatnonzero(np.abs(np.diff(owners)) == 1)
    return stages, np.minimum(owners[stages], owners[stages + 1])


@lru_cache(maxsize=1024)
def in_flight(shape: ChunkedShape) -> IntArray:
    """By stage, an upper bound on its microbatches in flight."""
    held = np.zeros(shape.depth, dtype=np.int64)
    for rank in range(shape.ranks):
        own = held_by(shape.laws, shape.ranks, shape.chunks, rank, shape.microbatches, recompute=False)
        held[list(shape.stages_of(rank))] = own.most
    return held
