"""Timed: what the blocks of a row's model take on a device of its GPU, from what was counted and the constants."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.truth.constants import GPUS, Constants, sheet_of
from benchmarks.truth.counted import Counted, CountedKind, Pass, RowKey, key_of
from benchmarks.truth.rows import Row
from pipeplan.arrays import IntArray
from worker_agent.profiler.kernels import Kernels


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """A pass's matrix products, attention, and other operations."""

    products_s: float
    attention_s: float
    others_s: float

    @property
    def computing_s(self) -> float:
        """All of its operations."""
        return self.products_s + self.attention_s + self.others_s


@dataclass(frozen=True, slots=True)
class KindSeconds:
    """A kind's passes. `attention` is what selective recomputation runs again, where attention keeps its scores."""

    forward: PassSeconds
    backward: PassSeconds
    attention: PassSeconds | None


@dataclass(frozen=True, eq=False)
class PassTable:
    """The passes of many kinds as one row of operations, which a datasheet times at once."""

    passes: tuple[Pass, ...]
    float8: bool

    @cached_property
    def _kernels(self) -> Kernels:
        each = [one_pass.float8 if self.float8 else one_pass.kernels for one_pass in self.passes]
        return Kernels.of([op for kernels in each for op in kernels.operations])

    @cached_property
    def _places(self) -> IntArray:
        """Three for each pass: products, attention, others."""
        places = [
            3 * number + (1 if "attention" in op.name else 2 if op.flops == 0 else 0)
            for number, one_pass in enumerate(self.passes)
            for op in (one_pass.float8 if self.float8 else one_pass.kernels).operations
        ]
        return np.array(places, dtype=np.int64)

    def seconds(self, gpu: str, constants: Constants, *, compiled: float) -> dict[Pass, PassSeconds]:
        """Of every pass; a compiler leaves the share `compiled` of what operations without products take."""
        sheet = sheet_of(gpu, constants.gpus[GPUS[gpu].constants])
        each = np.bincount(self._places, self._kernels.seconds(sheet), 3 * len(self.passes)).reshape(-1, 3)
        return {
            one_pass: PassSeconds(float(products_s), float(attention_s), float(others_s) * compiled)
            for one_pass, (products_s, attention_s, others_s) in zip(self.passes, each, strict=True)
        }


@dataclass(frozen=True, eq=False)
class Timer:
    """Times the blocks of these rows."""

    counted: Counted
    rows: Sequence[Row]

    @cached_property
    def _tables(self) -> dict[tuple[str, bool, bool], PassTable]:
        """By GPU, whether products have 8 bits, whether a compiler fuses."""
        wanted: dict[tuple[str, bool, bool], dict[Pass, None]] = {}
        for row in self.rows:
            passes = wanted.setdefault(_variant(row), {})
            for size in row.microbatches:
                for kind in self.kinds(row, size):
                    several = (kind.forward, kind.backward, kind.attention)
                    passes.update((each, None) for each in several if each is not None)
        return {variant: PassTable(tuple(passes), variant[1]) for variant, passes in wanted.items()}

    @cached_property
    def _keys(self) -> dict[Row, RowKey]:
        return {row: key_of(row) for row in self.rows}

    def kinds(self, row: Row, size: int) -> tuple[CountedKind, ...]:
        """A row's embedding, layer and head at a microbatch size."""
        return self.counted[self._keys[row], size]

    def timed(self, constants: Constants) -> dict[tuple[str, bool, bool], dict[Pass, PassSeconds]]:
        """All passes with these constants."""
        compiled = constants.engines["fsdp"].compiled or 1.0
        return {
            variant: table.seconds(variant[0], constants, compiled=compiled if variant[2] else 1.0)
            for variant, table in self._tables.items()
        }

    def of_row(
        self, row: Row, size: int, timed: dict[tuple[str, bool, bool], dict[Pass, PassSeconds]]
    ) -> list[KindSeconds]:
        """The seconds of a row's kinds."""
        seconds = timed[_variant(row)]
        return [
            KindSeconds(
                seconds[kind.forward],
                seconds[kind.backward],
                None if kind.attention is None else seconds[kind.attention],
            )
            for kind in self.kinds(row, size)
        ]


def _variant(row: Row) -> tuple[str, bool, bool]:
    return row.gpu, "fp8" in row.precision, "compile" in row.precision
