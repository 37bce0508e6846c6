"""Times: passes microbatches through the whole chain and measures the seconds of blocks and updates.

A pass takes one microbatch forward and backward, block by block. The graph is cut at every boundary, so that each
block's backward runs, and is measured, separately:

    inputs -> [block 0] -> outputs || leaves -> [block 1] -> ... -> [last block, loss]
              gradients <- leaves.grad  ||  <- [block 1] <- ... <- [loss, last block]

Blocks are measured in rounds over the whole chain. A block that runs alone is 6 to 10 % too fast, because its data stay
in the caches; in a round each block runs on the newest output of the previous block, after all others have used the
caches. For the same reason 2BP's p2 comes after the p1 of all blocks, as it does in a pipeline.

Gradients add to `.grad`s that already exist, as in training for all microbatches of a batch but the first, which
allocates them. Under autocast the copies of weights are there already, as for all microbatches but a version's first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from worker_agent.engine.backward import Split, add_weight_gradients, parametrizations_of
from worker_agent.engine.clocks import Clock
from worker_agent.engine.graphs import calls_bytes
from worker_agent.models.data import Microbatch
from worker_agent.models.losses import Loss
from worker_agent.models.spec import user_code
from worker_agent.models.values import Value, as_values, carries_gradient, first_trained, parts_of
from worker_agent.profiler.autocast import Autocast, entering

T = TypeVar("T", bound=Tensor)

Direction = Literal["forward", "backward"]
Around = Callable[[Direction, int], AbstractContextManager[None]]
"""A context entered around a block's forward and backward, to take times or to see saved tensors."""

SAMPLE_BYTES = 256 * 2**20
"""The bytes of weights from which the cost of a byte is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCrossing:
    """One block's part of a pass: its inputs (leaves of its graph), the roots of its graph, its output's size."""

    inputs: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]
    output_bytes: int

    @property
    def input_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs)


def pass_forward(
    blocks: Sequence[nn.Module],
    loss: Loss,
    inputs: Value,
    targets: Value,
    around: Around,
    autocast: Autocast | None = None,
) -> list[BlockCrossing]:
    """Runs every block on the outputs of the one before it. The loss belongs to the last block.

    Inputs get a gradient downstream of the first trained block. As in a run, no gradient goes back beyond that one.
    """
    crossings: list[BlockCrossing] = []
    values, first = as_values(inputs), first_trained(blocks)
    for index, block in enumerate(blocks):
        leaves = values
        if index > 0:
            leaves = tuple(t.detach().requires_grad_(index > first and carries_gradient(t)) for t in values)
        last = index == len(blocks) - 1
        with (
            user_code(f"block {index} ({type(block).__name__})"),
            entering(autocast, index),
            around("forward", index),
        ):
            result = block(*given(block, leaves))
            values = as_values(result)
            roots = (loss(result, targets),) if last else values
        size_bytes = sum(tensor.nbytes for tensor in values)
        graded = tuple(t for t in roots if carries_gradient(t))
        crossings.append(BlockCrossing(inputs=leaves, roots=graded, output_bytes=size_bytes))
        del result, roots
    return crossings


def given(block: nn.Module, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The block's arguments: its inputs or, if it may change them in place, views of them. No leaf may change."""
    if not any(getattr(module, "inplace", False) for module in block.modules()):
        return tuple(leaves)
    return tuple(torch.ops.aten._unsafe_view(t, t.shape) if t.requires_grad else t for t in leaves)


def pass_backward(crossings: list[BlockCrossing], around: Around, autocast: Autocast | None = None) -> None:
    """Runs every block's backward, last to first, and drops its crossing. Gradients of weights add to `.grad`."""
    scale = autocast.loss_scale if autocast else 1.0
    gradients = tuple(torch.full_like(root, scale) for root in crossings[-1].roots)
    while crossings:
        crossing = crossings.pop()
        pairs = [(root, g) for root, g in zip(crossing.roots, gradients, strict=True) if root.requires_grad]
        with user_code(f"the backward of block {len(crossings)}"), around("backward", len(crossings)):
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        wanted = [leaf for leaf in crossing.inputs if carries_gradient(leaf)]
        gradients = tuple(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in wanted)


@contextmanager
def nothing_around(direction: Direction, index: int) -> Iterator[None]:
    """An `Around` that does nothing."""
    yield


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """One block's seconds for a microbatch, one entry for each round."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def measure_times(
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Callable[[int], Microbatch],
    *,
    warm_up_rounds: int,
    rounds: int,
    make_clock: Callable[[], Clock],
    before_round: Callable[[int], None],
    autocast: Autocast | None = None,
) -> tuple[BlockTimes, ...]:
    """Every block's times over `rounds`, after the warm-up. A round's microbatch is `microbatch(round)`.

    `before_round` is called untimed with the number of the round; there several devices wait for each other.
    """
    clock: Clock

    @contextmanager
    def timed(direction: Direction, index: int) -> Iterator[None]:
        clock.mark()
        yield
        clock.mark()

    parameters = prepare_gradients(blocks)
    measured: list[list[float]] = []
    for number in range(warm_up_rounds + rounds):
        inputs, targets = microbatch(number)
        if parameters:
            torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
        before_round(number)
        clock = make_clock()
        pass_backward(pass_forward(blocks, loss, inputs, targets, timed, autocast), timed, autocast)
        seconds = _pairs_s(clock)
        if number >= warm_up_rounds:
            measured.append(seconds)

    # a round's seconds are in the order of execution: forwards first to last, then backwards last to first
    return tuple(
        BlockTimes(
            forward_s=tuple(seconds[index] for seconds in measured),
            backward_s=tuple(seconds[2 * len(blocks) - 1 - index] for seconds in measured),
        )
        for index in range(len(blocks))
    )


def measure_without_graph(
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Callable[[int], Microbatch],
    *,
    rounds: int,
    make_clock: Callable[[], Clock],
    autocast: Autocast | None = None,
) -> tuple[float, ...]:
    """Seconds of the whole chain's forward without a graph, as in a stage that recomputes; one entry for each round."""
    found: list[float] = []
    for number in range(rounds + 1):
        clock = make_clock()
        inputs, targets = microbatch(number)
        clock.mark()
        with torch.no_grad():
            pass_forward(blocks, loss, inputs, targets, nothing_around, autocast)
        clock.mark()
        found += _pairs_s(clock)
    return tuple(found[1:])


def prepare_gradients(blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Gives every trainable parameter a gradient of zeros; returns these parameters, each once."""
    parameters = list(dict.fromkeys(p for block in blocks for p in block.parameters() if p.requires_grad))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameters


@dataclass(frozen=True, kw_only=True)
class SplitTimes:
    """One block's seconds for a microbatch, one entry for each round, and the bytes that it keeps from p1 to p2.

    `defers`: whether p2 has anything to do. `split_forward_s` is the forward, in which calls are replaced.
    """

    split_forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    defers: bool = True
    weight_gradient_bytes: int

    @classmethod
    def of(cls, series: Sequence["SplitTimes"]) -> "SplitTimes":
        """The rounds of several series."""
        return cls(
            split_forward_s=tuple(seconds for times in series for seconds in times.split_forward_s),
            backward_input_s=tuple(seconds for times in series for seconds in times.backward_input_s),
            backward_weight_s=tuple(seconds for times in series for seconds in times.backward_weight_s),
            defers=any(times.defers for times in series),
            weight_gradient_bytes=max(times.weight_gradient_bytes for times in series),
        )


def measure_split(
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Callable[[int], Microbatch],
    *,
    rounds: int,
    make_clock: Callable[[], Clock],
    autocast: Autocast | None = None,
) -> tuple[SplitTimes, ...]:
    """Every block's times of 2BP's p1 and p2 over `rounds`, after one round that does not count."""
    prepare_gradients(blocks)
    every = [_split_round(blocks, loss, microbatch(number), make_clock(), autocast) for number in range(rounds + 1)]
    return tuple(
        replace(SplitTimes.of(one), weight_gradient_bytes=int(median(times.weight_gradient_bytes for times in one)))
        for one in zip(*every[1:], strict=True)
    )


def _split_round(
    blocks: Sequence[nn.Module], loss: Loss, microbatch: Microbatch, clock: Clock, autocast: Autocast | None
) -> list[SplitTimes]:
    """One round: p1 of all blocks, then p2 of all blocks, both last to first."""
    computed = [parametrizations_of([block]) for block in blocks]
    copies = [autocast.casts[index].copy_of if autocast else None for index in range(len(blocks))]
    splits: list[Split] = []

    @contextmanager
    def split(direction: Direction, index: int) -> Iterator[None]:
        clock.mark()  # a run, too, makes a split for each microbatch, and enters it twice
        if direction == "forward":
            splits.append(Split(blocks[index].parameters(), computed[index], copy_of=copies[index]))
        with splits[index].active(deferring=direction == "backward"):
            yield
        clock.mark()

    pass_backward(pass_forward(blocks, loss, *microbatch, split, autocast), split, autocast)
    device, kept_bytes = as_values(microbatch[0])[0].device, []
    for block, one in zip(blocks, splits, strict=True):
        own = [part for t in (*block.parameters(), *block.buffers()) for part in parts_of(t) or ()]
        owned = {part.untyped_storage().data_ptr() for part in own}
        storages = {address: size for call in one.deferred for address, size in call.storages().items()}
        tensors_bytes = sum(size for address, size in storages.items() if address not in owned)
        kept_bytes.append(tensors_bytes + calls_bytes(len(one.deferred), device))

    defers = tuple(bool(one.deferred) for one in splits)
    for one in reversed(splits):
        clock.mark()
        add_weight_gradients([one.deferred])
        clock.mark()
    seconds, count = _pairs_s(clock), len(blocks)
    return [
        SplitTimes(
            split_forward_s=(seconds[index],),
            backward_input_s=(seconds[2 * count - 1 - index],),
            backward_weight_s=(seconds[3 * count - 1 - index],),
            defers=defers[index],
            weight_gradient_bytes=kept_bytes[index],
        )
        for index in range(count)
    ]


def measure_version_s_per_byte(
    parameters: Sequence[nn.Parameter],
    *,
    rounds: int,
    make_clock: Callable[[], Clock],
    before_copy: Callable[[int], None],
) -> float:
    """Seconds of a copy of a weight version for each byte: the median of some copies; 0 without parameters."""
    sources = sampled([parameter.detach() for parameter in parameters])
    if not sources:
        return 0.0
    targets = [torch.empty_like(source) for source in sources]
    copies_s = []
    for number in range(rounds + 1):
        before_copy(number)
        copies_s.append(timed_s(lambda: torch._foreach_copy_(targets, sources), make_clock()))
    return median(copies_s[1:]) / sum(source.nbytes for source in sources)


def sampled(tensors: Sequence[T]) -> list[T]:
    """The first tensors, up to `SAMPLE_BYTES`, but at least one."""
    chosen: list[T] = []
    size_bytes = 0
    for tensor in tensors:
        if chosen and size_bytes + tensor.nbytes > SAMPLE_BYTES:
            break
        chosen.append(tensor)
        size_bytes += tensor.nbytes
    return chosen


def timed_s(work: Callable[[], object], clock: Clock) -> float:
    """The seconds of some work."""
    clock.mark()
    work()
    clock.mark()
    return _pairs_s(clock)[0]


def _pairs_s(clock: Clock) -> list[float]:
    """The seconds between the two marks of every pair that the clock noted."""
    marks_s = list(clock.seconds())
    return [end_s - start_s for start_s, end_s in zip(marks_s[0::2], marks_s[1::2], strict=True)]
