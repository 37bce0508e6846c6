"""Kernels: the time of an operation on a device, by its size.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer (Williams, Waterman and Patterson
2009, "Roofline"), and a time of its own to start and end.

Attention in one kernel does the operations of its formula, or half of them where later positions are masked (Dao 2023,
"FlashAttention-2", section 3.1), at a separate rate, which grows with the number of keys: a kernel starts and ends each
block of queries once.

The numbers of a type are its datasheet's (`datasheets.ProductShares`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from worker_agent.profiler.datasheets import Datasheet, ProductShares
from worker_agent.profiler.operations import MOST_COPIED_BYTES, DeviceOperation

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the tile that a multiprocessor computes at a time: those of NVIDIA's cutlass for tensor cores."""

SPLITS = (1, 2, 4, 8)
"""The numbers of parts into which the inner dimension may be split."""

PARTIAL_BYTES = 4
"""Parts of a shared inner dimension are float32."""

MISALIGNED = 4.0
"""The largest slowdown of a product whose operands are copied in parts: that of a product without tensor cores, which
have four times the rate (NVIDIA V100 whitepaper 2017: 31.4 of 125 Tflop/s in float16; A100 whitepaper 2020, table
1: 78 of 312). With cuBLAS before 11.0 such products did not use them at all ("Matrix Multiplication Background User's
Guide", "Tensor Core Requirements").
"""

BACKWARD_ATTENTION = 1.2
"""The slowdown of an operation of attention's backward relative to its forward (Dao 2023, section 4.1)."""


@dataclass(frozen=True, eq=False)
class Kernels:
    """Operations as arrays, with one entry for each, in order. `sizes` are batch, m, n, k of matrix products, or 0."""

    operations: tuple[DeviceOperation, ...]

    @classmethod
    def of(cls, operations: Sequence[DeviceOperation]) -> Self:
        return cls(tuple(operations))

    @cached_property
    def _flops(self) -> FloatArray:
        return np.array([op.flops * (0.5 if op.causal else 1.0) for op in self.operations])

    @cached_property
    def _moved_bytes(self) -> FloatArray:
        return np.array([float(op.moved_bytes) for op in self.operations])

    @cached_property
    def _attention(self) -> FloatArray:
        """Attention's slowdown relative to its forward; 0 for other operations."""
        slower = [BACKWARD_ATTENTION if "backward" in op.name else 1.0 for op in self.operations]
        return np.array([by * ("attention" in op.name) for by, op in zip(slower, self.operations, strict=True)])

    @cached_property
    def _keys(self) -> FloatArray:
        """Keys per query of attention; 1 for other operations."""
        return np.array([op.sizes.n if op.sizes and "attention" in op.name else 1.0 for op in self.operations])

    @cached_property
    def _sizes(self) -> FloatArray:
        """Batch, m, n and k of matrix products, one row each; 0 for other operations."""
        found = [op.sizes if "attention" not in op.name else None for op in self.operations]
        rows = [(s.batch, s.m, s.n, s.k) if s else (0, 0, 0, 0) for s in found]
        return np.array(rows, dtype=np.float64).reshape(-1, 4).T

    @cached_property
    def _slower(self) -> FloatArray:
        """The slowdown by small copies of 16-bit rows not aligned to 16 bytes, which arithmetic does not hide."""
        return np.array([min(MOST_COPIED_BYTES / op.copied_bytes, MISALIGNED) for op in self.operations])

    @cached_property
    def _dtypes(self) -> tuple[tuple[str, ...], IntArray]:
        """The dtypes in which something is computed, and which of them is each operation's; 0 for those without."""
        names = tuple(sorted({op.dtype for op in self.operations if op.flops}))
        places = {name: place for place, name in enumerate(names)}
        return names, np.array([places[op.dtype] if op.flops else 0 for op in self.operations], dtype=np.int64)

    def seconds(self, sheet: Datasheet) -> FloatArray:
        """The seconds of each operation on the datasheet's device.

        Raises InvalidInputError for matrix products in a dtype whose peak the datasheet does not state.
        """
        names, places = self._dtypes
        peaks = np.array([sheet.peak_flops_per_s(name) for name in names] or [1.0])[places]
        shares = [sheet.product_shares(name) for name in names] or [ProductShares()]
        efficiency = np.array([each.efficiency for each in shares])[places]
        attention = sheet.attention_efficiency * self._keys / (self._keys + sheet.attention_half_length)
        reached = peaks * sheet.sustained * np.where(self._attention > 0, attention, efficiency)
        if sheet.kind == "gpu":
            reached = reached / self._slower
        arithmetic_s = self._flops * np.maximum(self._attention, 1.0) / reached
        if sheet.multiprocessors is not None:
            depths = np.array([each.start_depth for each in shares])[places]
            reads = np.array([each.tile_reads for each in shares])[places]
            tiled_s = self._tiled_s(reached, depths, reads, sheet)
            arithmetic_s = np.where(self._sizes[0] > 0, tiled_s, arithmetic_s)
        bytes_per_s = np.where(self._sizes[0] > 0, sheet.product_bytes_per_s, sheet.reached_bytes_per_s)
        moving_s = self._moved_bytes / bytes_per_s
        started_s = sheet.kernel_s + np.where(self._attention > 0, sheet.attention_start_s, 0.0)
        return np.asarray(np.maximum(arithmetic_s, moving_s) + started_s)

    def _tiled_s(
        self, flops_per_s: FloatArray, start_depths: FloatArray, tile_reads: FloatArray, sheet: Datasheet
    ) -> FloatArray:
        """Seconds of matrix products by the fastest kernel, as a GPU's library chooses it.

        A product's result is cut into tiles, one for each multiprocessor at a time (NVIDIA, "Matrix Multiplication
        Background User's Guide", 2023, "Tile Quantization" and "Wave Quantization").
        """
        multiprocessors, bytes_per_s = sheet.multiprocessors or 1, sheet.product_bytes_per_s
        batch, m, n, k = self._sizes
        found = np.full(len(self.operations), np.inf)
        largest = _reads(TILES[0])
        for tile in TILES:
            # 1. A small tile reads more for each of its operations.
            slower = 1 + tile_reads * (_reads(tile) / largest - 1)
            tiles = batch * np.ceil(m / tile[0]) * np.ceil(n / tile[1])
            # 2. Few tiles may split the inner dimension, and add up the parts (Osama et al. 2023, "Stream-K", 2.2).
            for parts in SPLITS:
                # 3. Every wave takes as long as a full one.
                waves = np.ceil(tiles * parts / multiprocessors)
                flops = 2 * waves * multiprocessors * tile[0] * tile[1] * (k / parts + start_depths)
                added = (parts + 1) * batch * m * n * PARTIAL_BYTES if parts > 1 else 0.0
                found = np.minimum(found, slower * flops / flops_per_s + added / bytes_per_s)
        return found


def _reads(tile: tuple[int, int]) -> float:
    """The elements that a tile reads for each of its operations."""
    return 1 / tile[0] + 1 / tile[1]


def duration_s(operations: Sequence[DeviceOperation], sheet: Datasheet) -> float:
    """Seconds of these operations one after the other.

    A GPU computes while its host launches the next operation: the slower of the two decides. A CPU does both itself.
    Raises InvalidInputError for matrix products in a dtype whose peak the datasheet does not state.
    """
    computing_s = float(Kernels.of(operations).seconds(sheet).sum())
    launching_s = len(operations) * sheet.launch_s
    return max(computing_s, launching_s) if sheet.kind == "gpu" else computing_s + launching_s
