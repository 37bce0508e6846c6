"""Stage sum: the bytes that a worker of every stage [a, b) holds, for all planners of stages: the memory formula.

It is 2BW's (2021, appendix A.1.2), with |W| / d and |A| / d replaced by the bytes of the stage's own blocks.
`costs.memory` has the copies that a stage holds; `StageQuantities` are what they are copies of. A new term of memory is
a new count there, a new quantity here, and a line of `item_sums`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.memory import Copies
from pipeplan.documents.stage_memory import StageMemory


@dataclass(frozen=True, slots=True, eq=False)
class LargestBlock:
    """The largest bytes of one block of a stage, in a number of `copies`.

    `of_stages`: (starts, stops), which broadcast -> these bytes; `least` is the smallest block's.
    """

    of_stages: Callable[[IntArray, IntArray], FloatArray]
    least: float
    copies: float = 1.0


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageQuantities:
    """The bytes of which a stage holds copies: arrays with an entry before each block, and one after the last.

    `weights`, `untrained` and `late` are sums over the blocks before; `late` gives the bytes of a number of gradients
    beyond activations. `kept` and `block_inputs` are pairs of sums, as `costs.memory.kept_sums` has them: a
    microbatch's activations, and the inputs of all blocks. A stage that begins at a place has its `inputs`, and one
    that ends there its `outputs`, of which `kept_outputs` are among the activations.
    """

    weights: FloatArray
    untrained: FloatArray
    late: Callable[[int], FloatArray]
    kept: tuple[FloatArray, FloatArray]
    inputs: FloatArray
    outputs: FloatArray
    kept_outputs: FloatArray
    workspaces: LargestBlock | None = None
    block_inputs: tuple[FloatArray, FloatArray] | None = None
    blocks_again: LargestBlock | None = None


def item_sums(of: StageQuantities, copies: Copies) -> Mapping[str, StageSum]:
    """What a worker of every stage holds, by the items of `StageMemory`."""
    nothing = np.zeros(len(of.weights))

    def summed(sums: FloatArray, largest: LargestBlock | None = None, count: float = 0.0) -> StageSum:
        blocks = (replace(largest, copies=count),) if largest and count else ()
        return StageSum(sums=sums, first=nothing, last=nothing, largest=blocks)

    def in_a_row(sums: tuple[FloatArray, FloatArray], count: float) -> StageSum:
        until, before = sums
        return StageSum(sums=count * until, first=count * (until - before), last=nothing)

    activations = in_a_row(of.kept, copies.activations)
    activations += StageSum(sums=nothing, first=copies.inputs * of.inputs, last=nothing)
    if copies.block_inputs and of.block_inputs:
        activations += in_a_row(of.block_inputs, copies.block_inputs)
    return {
        "weights": summed(copies.stored * of.weights + of.untrained),
        "gradients": summed(copies.gradients * of.weights + of.late(copies.late_gradients)),
        "master_weights": summed(copies.master_weights * of.weights),
        "optimizer_states": summed(copies.optimizer_states * of.weights),
        "activations": activations + summed(nothing, of.blocks_again, copies.blocks_again),
        "transient": summed(nothing, of.workspaces, copies.transients),
        "buffers": StageSum(
            sums=nothing,
            first=copies.buffer_bytes(of.inputs, nothing, nothing),
            last=copies.buffer_bytes(nothing, of.outputs, of.kept_outputs),
        ),
    }


def stage_sum(of: StageQuantities, copies: Copies) -> StageSum:
    """All that a worker of every stage holds."""
    first, *others = item_sums(of, copies).values()
    return sum(others, first)


def stage_memory(of: StageQuantities, copies: Copies, start: int, stop: int) -> StageMemory:
    """What a worker of one stage holds, by item."""
    place = np.asarray(start), np.asarray(stop)
    return StageMemory(**{name: int(each.at(*place)) for name, each in item_sums(of, copies).items()})
