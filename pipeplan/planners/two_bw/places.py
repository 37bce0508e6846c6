"""Places: the possible starts and stops of stages, as the arrays from which their costs are computed.

A `StageTable` has one stage, every start against every stop. `Bands` have several stages at once, every start against
`reach` lengths: for short stages this leaves few cells, and few calls. Both give the same numbers for a place.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipeplan.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class StageTable:
    """[start, stop]: one stage, for the starts and stops of two ranges."""

    stage: int
    first: slice
    last: slice

    def of_stages(self, values: FloatArray) -> FloatArray:
        """An array's entry of the stage."""
        return np.asarray(values[self.stage])

    def starts(self, sums: FloatArray, rows: IntArray | None = None) -> FloatArray:
        """An array's entries at the starts; of a row for each stage where they are given."""
        return (sums if rows is None else sums[rows[self.stage]])[self.first]

    def stops(self, sums: FloatArray, rows: IntArray | None = None) -> FloatArray:
        """The same at the stops."""
        return (sums if rows is None else sums[rows[self.stage]])[self.last]

    def between(self, before: FloatArray, until: FloatArray) -> FloatArray:
        """The differences of sums at the stops and at the starts."""
        return np.asarray(until - before[:, None])

    @property
    def ranges(self) -> tuple[IntArray, IntArray]:
        """The starts and the stops, as they broadcast."""
        starts, stops = np.arange(self.first.start, self.first.stop), np.arange(self.last.start, self.last.stop)
        return starts[:, None], stops

    @property
    def none(self) -> BoolArray:
        """False for every cell: no cell is known to be ruled out."""
        return np.zeros((self.first.stop - self.first.start, self.last.stop - self.last.start), dtype=bool)


@dataclass(frozen=True, eq=False)
class Bands:
    """[stage, start, length]: consecutive stages; of stage s, `rows` starts from `lows[s]` on, against `reach` lengths.

    The shortest is `shortest[s]`. Where a stop is beyond all `blocks`, a cell has the value of another place.
    """

    stages: slice
    lows: IntArray
    shortest: IntArray
    rows: int
    reach: int
    blocks: int

    def of_stages(self, values: FloatArray) -> FloatArray:
        """An array's entries of the stages."""
        return np.asarray(values[self.stages][:, None])

    def starts(self, sums: FloatArray, rows: IntArray | None = None) -> FloatArray:
        """An array's entries at the starts; of a row for each stage where they are given."""
        return sums[self._starts] if rows is None else sums[rows[self.stages][:, None], self._starts]

    def stops(self, sums: FloatArray, rows: IntArray | None = None) -> FloatArray:
        """The same at all stops of the stage."""
        return sums[self._stops] if rows is None else sums[rows[self.stages][:, None], self._stops]

    def between(self, before: FloatArray, until: FloatArray) -> FloatArray:
        """The differences of sums at the stops and at the starts."""
        return np.asarray(windows(until, self.reach) - before[:, :, None])

    @property
    def ranges(self) -> tuple[IntArray, IntArray]:
        """The starts and the stops, as they broadcast."""
        return self._starts[:, :, None], windows(self._stops, self.reach)

    @property
    def none(self) -> BoolArray:
        """The cells that are no stage: those that end beyond all blocks."""
        ends = (self.lows + self.shortest)[:, None] + np.arange(self.rows + self.reach - 1)
        return windows(ends > self.blocks, self.reach).copy()

    @cached_property
    def _starts(self) -> IntArray:
        return np.asarray(np.minimum(self.lows[:, None] + np.arange(self.rows), self.blocks))

    @cached_property
    def _stops(self) -> IntArray:
        ends = (self.lows + self.shortest)[:, None] + np.arange(self.rows + self.reach - 1)
        return np.asarray(np.minimum(ends, self.blocks))


Places = StageTable | Bands

_Values = TypeVar("_Values", bound=np.generic)


def windows(values: npt.NDArray[_Values], reach: int) -> npt.NDArray[_Values]:
    """[..., i, k] -> the value i + k of the last axis: a view of a contiguous array."""
    *outer, step = values.strides
    shape = (*values.shape[:-1], values.shape[-1] - reach + 1, reach)
    return np.ndarray(shape, values.dtype, values, 0, (*outer, step, step))
