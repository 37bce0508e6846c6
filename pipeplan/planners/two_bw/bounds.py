"""Bounds: for many configurations at once, upper bounds on the rates and lower bounds on the bytes of their splits.

The slowest stage takes at least an equal share of all compute and transfers, at least its longest block, and at least
its gradient exchange. Transfers are charged on the fastest links that an orientation leaves. Only the crossings of
every row of ranks are charged on the slower links.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.costs.collectives import all_reduce
from pipeplan.costs.memory import copies
from pipeplan.costs.transfer import Bandwidths, boundary_bytes
from pipeplan.planners.measured import MeasuredBlocks
from pipeplan.planners.problem import PlanningProblem, recompute_units
from pipeplan.planners.two_bw.shapes import Execution, ShapeRows
from pipeplan.planners.two_bw.split import ROUNDING
from pipeplan.planners.two_bw.terms import PipelineShape, is_flushed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Configurations:
    """Arrays with an entry for each configuration; `size` is the index of the microbatch size."""

    execution: Execution
    width: IntArray
    depth: IntArray
    size: IntArray
    microbatches: IntArray

    def __len__(self) -> int:
        return len(self.width)

    @property
    def filled(self) -> BoolArray:
        """Where a batch is longer than the pipeline's fill: no stage keeps all of it, unless all stages do.

        Where a stage keeps all of a batch, its gradients may be late.
        """
        held = self.depth if self.execution.laws.fills else np.ones_like(self.depth)
        if self.execution.laws.gathers_beside(held=1, microbatches=1):
            return np.asarray(held <= self.microbatches)
        return np.asarray(held < self.microbatches)

    def some(self, chosen: IntArray) -> "Configurations":
        """These configurations, in this order."""
        return Configurations(
            execution=self.execution,
            width=self.width[chosen],
            depth=self.depth[chosen],
            size=self.size[chosen],
            microbatches=self.microbatches[chosen],
        )

    def shape(self, place: int, sizes: Sequence[int]) -> PipelineShape:
        """The shape of configuration `place`; `sizes` maps the indices to microbatch sizes."""
        return PipelineShape(
            schedule=self.execution.schedule,
            width=int(self.width[place]),
            depth=int(self.depth[place]),
            microbatch_size=sizes[self.size[place]],
            microbatches=int(self.microbatches[place]),
            recompute=self.execution.recompute,
        )


def joined(several: Sequence[Configurations]) -> Configurations:
    """One execution's configurations, joined."""
    return Configurations(
        execution=several[0].execution,
        width=np.concatenate([found.width for found in several]),
        depth=np.concatenate([found.depth for found in several]),
        size=np.concatenate([found.size for found in several]),
        microbatches=np.concatenate([found.microbatches for found in several]),
    )


def expand(rows: ShapeRows) -> Configurations:
    """Every depth of every row."""
    depths = rows.depths
    row = np.repeat(np.arange(len(rows)), depths)
    first = np.cumsum(depths) - depths
    depth = np.arange(len(row)) - first[row] + rows.shallowest[row]
    return Configurations(
        execution=rows.execution,
        width=rows.width[row],
        depth=depth,
        size=rows.size[row],
        microbatches=rows.microbatches[row],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RateBounds:
    """The bounds of one execution's configurations."""

    problem: PlanningProblem
    measured: MeasuredBlocks
    execution: Execution
    master_weights: bool

    def row_rates(self, rows: ShapeRows) -> FloatArray:
        """By row, an upper bound on samples a second at any depth, by its compute."""
        total_s, block_s = self._total_s[rows.size], self._block_s.max(axis=1)[rows.size]
        if not self.execution.laws.pipelined:
            least_s = total_s
        else:
            low, high = self._slots(rows.microbatches, rows.shallowest), self._slots(rows.microbatches, rows.deepest)
            least_s = np.maximum(total_s / rows.deepest * high, block_s * low)
        return rows.width * self._sizes[rows.size] / least_s * (1 + ROUNDING)

    def deep_enough(self, rows: ShapeRows, rate: float) -> ShapeRows:
        """The rows at the depths that may reach this rate."""
        if not self.execution.laws.pipelined or rate <= 0.0:
            return rows
        needed = rate * (1 - ROUNDING) * self._total_s[rows.size] / (rows.width * self._sizes[rows.size])
        shallowest = np.maximum(rows.shallowest, np.ceil(np.minimum(needed, 2.0**62)).astype(np.int64))
        return ShapeRows(
            execution=rows.execution,
            width=rows.width,
            size=rows.size,
            microbatches=rows.microbatches,
            shallowest=shallowest,
            deepest=rows.deepest,
        )

    def least_s(self, found: Configurations) -> FloatArray:
        """Lower bounds on seconds a microbatch, the flush included, on the better orientation."""
        least_s = np.minimum(*(self._step_s(found, pipelines) for pipelines in (True, False)))
        return np.asarray(least_s * self._slots(found.microbatches, found.depth) * (1 - ROUNDING))

    def rates(self, found: Configurations, least_s: FloatArray) -> FloatArray:
        """Samples a second at these seconds a microbatch."""
        return np.asarray(found.width * self._sizes[found.size] / least_s)

    def least_bytes(self, found: Configurations) -> FloatArray:
        """Lower bounds on the fullest stage's bytes: `PipelineTerms.least_bytes`, and at least the largest block's."""
        recomputes = self.execution.recompute is not False
        copies_of_weights = np.where(found.filled, self._weights(filled=True), self._weights(filled=False))
        weights, activations = self.measured.weight_bytes, self.measured.added_bytes
        untrained = self.measured.untrained_bytes

        # Over the stages: the maximum copies of activations, and the sum of 1 / (copies of activations).
        depth = found.depth.astype(np.float64)
        if recomputes or not self.execution.laws.fills:
            most, shares = np.ones(len(found)), depth
        elif self.execution.laws.keeps_batch:
            most = found.microbatches.astype(np.float64)
            shares = depth / most
        elif self.problem.options.memory == "paper":
            most, shares = depth, np.ones(len(found))
        else:
            numbers = np.arange(self.execution.deepest + 1, dtype=np.float64)
            numbers[0] = np.inf
            harmonic = np.cumsum(1.0 / numbers)
            filled = np.minimum(found.depth, found.microbatches)
            most, shares = filled.astype(np.float64), harmonic[filled] + (found.depth - filled) / filled

        by_block = recomputes and "block" in recompute_units(self.problem, self.execution.laws)
        kept = self.measured.least_kept if by_block else activations
        together = kept.sum(axis=1)[found.size] + (copies_of_weights * weights.sum() + untrained.sum()) / most
        copies_of_filled = [self._weights(filled=filled) for filled in (False, True)]
        blocks = np.stack([(each * weights + untrained + activations).max(axis=1) for each in copies_of_filled])
        block = blocks[found.filled.astype(np.int64), found.size]
        return np.asarray(np.maximum(together / shares, block) * (1 - ROUNDING))

    def _slots(self, microbatches: IntArray, depth: IntArray) -> FloatArray:
        if is_flushed(self.execution.laws):
            return np.asarray((microbatches + depth - 1) / microbatches)
        return np.ones(len(depth))

    def _step_s(self, found: Configurations, pipelines: bool) -> FloatArray:
        """On one orientation, seconds a microbatch of the slowest stage or, without pipelining, of all stages."""
        width, depth, size = found.width, found.depth, found.size

        # The levels up to which every edge and every exchange reach at least: pipelines in a row have edges between
        # neighbours and replicas d ranks apart; of stages in a row, two span 2w ranks, and replicas are neighbours.
        units = self._bandwidths.units
        edge_level = np.searchsorted(units, np.full_like(width, 2) if pipelines else 2 * width)
        group_level = np.searchsorted(units, (width - 1) * depth + 1 if pipelines else width)

        # Seconds of all edges: the fewest bytes, the smallest of them on the slowest links.
        edges, ranks = depth - 1, depth if pipelines else depth * width
        speeds = self._bandwidths.of_levels(np.arange(len(units) + 1))
        transfers_s = self._crossing[size, edges] / speeds[0]
        for level, unit in enumerate(units.tolist(), start=1):
            crossings = np.where(edge_level >= level, edges, np.minimum((ranks - 1) // unit, edges))
            slower = 1.0 / speeds[level] - 1.0 / speeds[level - 1]
            transfers_s = transfers_s + self._crossing[size, crossings] * slower

        weights = self.measured.weight_bytes
        share = all_reduce(width.astype(np.float64))
        exchange_s = share / self._bandwidths.of_levels(group_level) / found.microbatches
        busy_s = self._total_s[size] + 2.0 * transfers_s
        if not self.execution.laws.pipelined:
            return np.asarray(np.maximum(busy_s, exchange_s * weights.sum()))

        longest_s = self._block_s.max(axis=1)[size]
        first_edge_s = self._crossing[size, np.minimum(depth - 1, 1)] / self._bandwidths.of_levels(edge_level)
        exchanged = np.maximum(weights.sum() / depth, weights.max())
        return np.asarray(np.maximum(np.maximum(busy_s / depth, longest_s + first_edge_s), exchange_s * exchanged))

    def _weights(self, *, filled: bool) -> float:
        """The fewest copies of weights that a stage holds, where a batch fills the pipeline and where it does not."""
        options, recompute, laws = self.problem.options, self.execution.recompute, self.execution.laws
        late = not filled and not laws.gathers_beside(held=1, microbatches=1)
        held = [
            copies(
                options.memory,
                laws,
                options.optimizer_or_default,
                recompute=mode,
                depth=2,
                stage=1,
                microbatches=1 if late else 2,
                dtype=self.problem.profile.dtype,
                autocast=self.problem.profile.autocast,
                master_weights=self.master_weights,
            )
            for mode in ((False, True) if recompute is None else (recompute,))
        ]
        return min(each.weights for each in held)

    @cached_property
    def _sizes(self) -> FloatArray:
        return np.asarray(self.measured.sizes, dtype=np.float64)

    @cached_property
    def _block_s(self) -> FloatArray:
        """Every block's least seconds, by size."""
        recomputed_s = self.measured.recomputed_s(self.problem.options.recompute_factor)
        if self.execution.recompute:
            return recomputed_s
        compute_s = self.measured.forward_s + self.measured.backward_s
        return compute_s if self.execution.recompute is False else np.minimum(compute_s, recomputed_s)

    @cached_property
    def _total_s(self) -> FloatArray:
        return np.asarray(self._block_s.sum(axis=1))

    @cached_property
    def _crossing(self) -> FloatArray:
        """[size, edges]: the fewest bytes of this number of boundaries, in both directions."""
        crossing = np.sort(boundary_bytes(1.0) * self.measured.output_bytes[:, :-1], axis=1)
        return np.pad(np.cumsum(crossing, axis=1), ((0, 0), (1, 0)))

    @cached_property
    def _bandwidths(self) -> Bandwidths:
        return Bandwidths(self.problem.cluster)
