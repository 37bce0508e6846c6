"""Whole blocks: how short the longest stage can be at best, because blocks are not divided and memory is limited.

In t seconds a stage computes at most k(t) blocks, wherever it starts: the largest k for which the least sum over k
blocks in a row is within t. With h microbatches in flight, memory allows at most k_h blocks. A stage that recomputes
keeps one microbatch's activations, or by block at least the smaller of activations and input of every block, but takes
longer. All stages together must hold all blocks. The least t for which they can is a bound, for every depth and
microbatch size at once. It does not count transfers.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.problem import PlanningProblem, recompute_units
from pipeplan.planners.two_bw.measured import MeasuredBlocks
from pipeplan.planners.two_bw.shapes import Execution
from pipeplan.planners.two_bw.split import ROUNDING

MOST_BLOCKS = 64
"""Stages of more blocks count as unlimited: a share of the whole is then as tight a bound."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeBlocks:
    """The bound for one execution; `weights` are the copies of weights that a stage holds."""

    problem: PlanningProblem
    measured: MeasuredBlocks
    execution: Execution
    weights: float

    @cached_property
    def least_s(self) -> FloatArray:
        """[size, depth]: lower bounds on the longest stage's seconds; infinite if memory allows no split."""
        depths = np.arange(self.execution.deepest + 1)
        low = np.zeros((len(self.measured.sizes), len(depths)), dtype=np.int64)
        high = np.full_like(low, self._times_s.shape[1])
        while (low < high).any():
            middle = np.minimum((low + high) // 2, self._times_s.shape[1] - 1)

            # Upper bounds on the stages' blocks in these times.
            plain, again = (np.take_along_axis(blocks, middle, axis=1) for blocks in self._in_times)
            if self.execution.recompute:
                held = depths * again
            elif self.problem.options.memory == "paper":
                held = depths * np.maximum(np.minimum(plain, self._keepable[:, : len(depths)]), again)
            else:
                # Counted from the last stage, each holds one more microbatch in flight. Time limits the first of them,
                # then memory does; where that leaves fewer blocks than recomputation allows, the others recompute.
                free = np.minimum(np.take_along_axis(self._with_at_least, plain, axis=1), depths)
                tight = np.clip(np.take_along_axis(self._with_at_least, again, axis=1), free, depths)
                between = np.take_along_axis(self._sums, tight, axis=1) - np.take_along_axis(self._sums, free, axis=1)
                held = free * plain + between + (depths - tight) * again

            enough = held >= self.measured.blocks
            high = np.where(enough, np.minimum(middle, high), high)
            low = np.where(enough, low, np.minimum(middle + 1, high))
        times_s = np.pad(self._times_s, ((0, 0), (0, 1)), constant_values=np.inf)
        return np.take_along_axis(times_s, low, axis=1) * (1 - ROUNDING)

    @cached_property
    def _in_times(self) -> tuple[IntArray, IntArray]:
        """[size, time]: the blocks that a stage computes without, and as far as memory allows with recomputation."""
        computed = []
        for mode in (False, True):
            if self.execution.recompute not in (None, mode):
                computed.append(np.zeros(self._times_s.shape, dtype=np.int64))
                continue
            pairs = zip(self._again_s if mode else self._plain_s, self._times_s, strict=True)
            counts = [np.searchsorted(runs_s, times_s, side="right") for runs_s, times_s in pairs]
            computed.append(self._unlimited(np.stack(counts)))
        plain, again = computed
        by_block = "block" in recompute_units(self.problem, self.execution.laws)
        kept = self.measured.least_kept if by_block else self.measured.added_bytes
        return plain, np.minimum(again, self._limit(np.ones(1), kept)[:, :1])

    @cached_property
    def _most(self) -> int:
        return min(MOST_BLOCKS, self.measured.blocks)

    def _runs(self, values: FloatArray) -> FloatArray:
        """[size, k]: the least sum of k + 1 blocks in a row."""
        sums = np.pad(np.cumsum(values, axis=1), ((0, 0), (1, 0)))
        blocks = self.measured.blocks
        return np.stack(
            [(sums[:, k:] - sums[:, : blocks + 1 - k]).min(axis=1) for k in range(1, self._most + 1)], axis=1
        )

    @cached_property
    def _plain_s(self) -> FloatArray:
        return self._runs(self.measured.forward_s + self.measured.backward_s)

    @cached_property
    def _again_s(self) -> FloatArray:
        return self._runs(self.measured.recomputed_s(self.problem.options.recompute_factor))

    @cached_property
    def _times_s(self) -> FloatArray:
        """[size, :]: the times at which one more block is possible, ascending."""
        used = {False: (self._plain_s,), True: (self._again_s,), None: (self._plain_s, self._again_s)}
        return np.sort(np.concatenate(used[self.execution.recompute], axis=1), axis=1)

    def _unlimited(self, blocks: IntArray) -> IntArray:
        """The counts, with all blocks for a count that reaches the limit of counting."""
        return np.where(blocks >= self._most, self.measured.blocks, blocks)

    def _limit(self, held: FloatArray, kept: FloatArray) -> IntArray:
        """[size, h]: the capacity of a device in blocks with h microbatches in flight, which keep `kept` bytes each."""
        held_once = self.measured.untrained_bytes
        weights = self._runs((self.weights * self.measured.weight_bytes + held_once)[None, :])
        device_bytes = self.problem.cluster.device.usable_bytes * (1 + ROUNDING)
        rows = [(weights + held[:, None] * row <= device_bytes).sum(axis=1) for row in self._runs(kept)]
        return self._unlimited(np.stack(rows))

    @cached_property
    def _keepable(self) -> IntArray:
        """[size, h]: the number of blocks that a stage keeps without recomputation with h in flight."""
        held = np.arange(max(self.execution.deepest, 1) + 1, dtype=np.float64)
        if not self.execution.laws.fills:
            held = np.ones(len(held))
        return self._limit(held, self.measured.added_bytes)

    @cached_property
    def _sums(self) -> IntArray:
        """[size, d]: the blocks that d stages keep together, with 1 to d in flight."""
        return np.pad(np.cumsum(self._keepable[:, 1:], axis=1), ((0, 0), (1, 0)))

    @cached_property
    def _with_at_least(self) -> IntArray:
        """[size, k]: upper bound on those in flight with which a stage keeps k blocks."""
        blocks = np.arange(self.measured.blocks + 1)
        falling = -self._keepable[:, 1:]
        return np.stack([np.searchsorted(row, -blocks, side="right") for row in falling])
