"""Measured: a profile as arrays, a row a microbatch size and a column a block."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray
from pipeplan.documents.measurement import KNOWN_BYTES
from pipeplan.documents.profile import Profile

_TIMES = ("forward_s", "backward_s")
_BYTES = (*KNOWN_BYTES, "shared_bytes")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredBlocks:
    """A profile's measurements, a row a microbatch size and a column a block.

    `weight_bytes` are those of trained weights, `untrained_bytes` those of frozen weights and buffers. `counts_input`:
    whether the block's input is known to be among its activations.
    """

    sizes: tuple[int, ...]
    weight_bytes: FloatArray
    untrained_bytes: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    input_bytes: FloatArray
    output_bytes: FloatArray
    activation_bytes: FloatArray
    workspace_bytes: FloatArray
    shared_bytes: FloatArray
    kept_output_bytes: FloatArray
    passed_bytes: FloatArray
    counts_input: BoolArray

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.weight_bytes)

    def at(self, sizes: Sequence[int]) -> "MeasuredBlocks":
        """The rows of these sizes, interpolated where they were not measured, as in `documents.measurement`."""
        return MeasuredBlocks(
            sizes=tuple(sizes),
            weight_bytes=self.weight_bytes,
            untrained_bytes=self.untrained_bytes,
            **{name: interpolated(getattr(self, name), self.sizes, sizes) for name in _TIMES},
            **{name: np.rint(interpolated(getattr(self, name), self.sizes, sizes)) for name in _BYTES},
            counts_input=interpolated(self.counts_input.astype(np.float64), self.sizes, sizes) > 0,
        )

    @property
    def added_bytes(self) -> FloatArray:
        """Lower bound on a microbatch's bytes of every block, in any stage: `Measurement.added_bytes`."""
        return self.activation_bytes - self.shared_bytes

    @property
    def least_kept(self) -> FloatArray:
        """The same if stages may recompute by block."""
        return np.minimum(self.added_bytes, self.input_bytes - self.passed_inputs)

    @property
    def passed_inputs(self) -> FloatArray:
        """The part of every block's input that the block before only forwards (`costs.memory.passed_inputs`)."""
        return np.pad(np.minimum(self.passed_bytes[:, :-1], self.input_bytes[:, 1:]), ((0, 0), (1, 0)))

    @property
    def again_bytes(self) -> FloatArray:
        """Every block's bytes when it has run again: `Measurement.again_bytes`."""
        known = self.counts_input * self.input_bytes + np.maximum(self.kept_output_bytes - self.passed_bytes, 0.0)
        return np.asarray(self.output_bytes - self.passed_bytes + np.maximum(self.activation_bytes - known, 0.0))

    def recomputed_s(self, recompute_factor: float | None) -> FloatArray:
        """Forward and backward with recomputation, of every block (`costs.compute.compute_s`)."""
        if recompute_factor is None:
            return self.forward_s + self.backward_s + self.forward_s
        return (self.forward_s + self.backward_s) * recompute_factor


def interpolated(rows: FloatArray, measured: Sequence[int], sizes: Sequence[int]) -> FloatArray:
    """[size, block]: rows of the measured sizes, ascending, at other sizes between them: linear in the size."""
    known, wanted = np.asarray(measured), np.asarray(sizes)
    above = np.searchsorted(known, wanted)
    below = np.where(known[above] == wanted, above, above - 1)
    width = np.maximum(known[above] - known[below], 1)
    share = (wanted - known[below]) / width
    return np.asarray(rows[below] + share[:, None] * (rows[above] - rows[below]))


def measured(profile: Profile) -> MeasuredBlocks:
    """The profile's own sizes."""
    sizes = profile.microbatch_sizes
    rows = [sorted(block.measurements, key=lambda m: m.microbatch_size) for block in profile.blocks]
    columns = {
        name: np.asarray([[getattr(m, name) or 0 for m in row] for row in rows], dtype=np.float64).T
        for name in (*_TIMES, *_BYTES)
    }
    counts_input = np.asarray([[m.shared_bytes is not None for m in row] for row in rows]).T
    return MeasuredBlocks(
        sizes=sizes,
        weight_bytes=np.asarray([block.trained_bytes for block in profile.blocks], dtype=np.float64),
        untrained_bytes=np.asarray([block.untrained_bytes for block in profile.blocks], dtype=np.float64),
        counts_input=counts_input,
        **columns,
    )
