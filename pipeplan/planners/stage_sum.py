"""Stage sum: bytes of all stages [a, b) of a chain, from a few arrays over its blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class LargestBlock:
    """`copies` of the largest bytes of one block of a stage.

    `of_stages`: (starts, stops), which broadcast -> these bytes; `least` are those of the smallest block.
    """

    copies: float
    of_stages: Callable[[IntArray, IntArray], FloatArray]
    least: float


@dataclass(frozen=True, kw_only=True, eq=False)
class StageSum:
    """Bytes of every stage [a, b): sums[b] - sums[a] + first[a] + last[b], and those of largest blocks.

    All arrays have an entry before each block, and one after the last. `sums` never fall; `first` are bytes of the
    block that a stage begins with, `last` of the block that it ends with.
    """

    sums: FloatArray
    first: FloatArray
    last: FloatArray
    largest: tuple[LargestBlock, ...] = ()

    def __add__(self, other: "StageSum") -> "StageSum":
        """The sum of both, of every stage."""
        return StageSum(
            sums=self.sums + other.sums,
            first=self.first + other.first,
            last=self.last + other.last,
            largest=(*self.largest, *other.largest),
        )

    @cached_property
    def until(self) -> FloatArray:
        """By stop: without largest blocks, bytes are the differences of `until` and `before`."""
        return self.sums + self.last

    @cached_property
    def before(self) -> FloatArray:
        """By start."""
        return self.sums - self.first

    @cached_property
    def listed(self) -> list[float]:
        """The sums as a list."""
        sums: list[float] = self.sums.tolist()
        return sums

    def at(self, starts: IntArray, stops: IntArray) -> FloatArray:
        """The bytes of stages whose starts and stops broadcast."""
        found = self.until[stops] - self.before[starts]
        for each in self.largest:
            found = found + each.copies * each.of_stages(starts, stops)
        return np.asarray(found)

    def table(self) -> FloatArray:
        """[start, stop]: the bytes of all stages; without meaning where a stage would have no block."""
        places = np.arange(len(self.sums))
        return self.at(places[:, None], places)

    def least_besides(self, *, is_first: bool) -> float:
        """Lower bound on what a stage has beyond its `sums`: the first stage of the model, or any other."""
        inner = self.last[1:-1]
        first = self.first[0] if is_first else self.first[1:-1].min(initial=np.inf)
        last = inner.min() if len(inner) else 0.0
        return float(first + last + sum(each.copies * each.least for each in self.largest))

    def most(self, lows: IntArray, highs: IntArray) -> FloatArray:
        """Upper bounds on the bytes of all stages that begin at `lows` or later, and end at `highs` or earlier."""
        until = np.maximum.accumulate(self.until)[highs]
        before = np.minimum.accumulate(self.before[::-1])[::-1][lows]
        return np.asarray(until - before + sum(each.copies * each.of_stages(lows, highs) for each in self.largest))
