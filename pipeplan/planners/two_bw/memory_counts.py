"""Memory counts: the copies of their blocks' bytes that a pipeline's stages hold (2BW 2021, appendix A.1.2)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.memory import Copies
from pipeplan.documents.plan import RECOMPUTE_UNITS


@dataclass(frozen=True, eq=False)
class MemoryCounts:
    """The copies held on every stage of a pipeline in one mode: `Copies`, and each count as an array.

    `unit` is the unit of recomputation, where the mode recomputes.
    """

    copies: tuple[Copies, ...]
    unit: str = RECOMPUTE_UNITS[0]

    @cached_property
    def weights(self) -> FloatArray:
        return self._column(lambda held: held.weights)

    @cached_property
    def late_gradients(self) -> int:
        """Gradients in copies of the weights, on the stages that have late ones."""
        return max(held.late_gradients for held in self.copies)

    @cached_property
    def late(self) -> FloatArray:
        """1 where a stage's gradients are late, else 0."""
        return self._column(lambda held: bool(held.late_gradients))

    @cached_property
    def activations(self) -> FloatArray:
        return self._column(lambda held: held.activations)

    @cached_property
    def inputs(self) -> FloatArray:
        """Kept inputs, and buffers of their size."""
        return self._column(lambda held: held.inputs + held.input_buffers)

    @cached_property
    def outputs(self) -> FloatArray:
        """Buffers of the output's size."""
        return self._column(lambda held: held.output_buffers)

    @cached_property
    def kept_outputs(self) -> FloatArray:
        """The part of them that are outputs of microbatches kept whole."""
        return self._column(lambda held: held.kept_outputs)

    @cached_property
    def transients(self) -> FloatArray:
        return self._column(lambda held: held.transients)

    @cached_property
    def block_inputs(self) -> FloatArray:
        return self._column(lambda held: held.block_inputs)

    @cached_property
    def blocks_again(self) -> FloatArray:
        return self._column(lambda held: held.blocks_again)

    def _column(self, count: Callable[[Copies], float]) -> FloatArray:
        return np.asarray([count(held) for held in self.copies], dtype=np.float64)
