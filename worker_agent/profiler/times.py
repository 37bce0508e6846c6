"""Passage: one microbatch through the whole chain, forward and backward, block by block.

The graph is cut at every boundary, so that each block's backward can be run, and looked at, for itself:

    inputs -> [block 0] -> outputs || leaves -> [block 1] -> ... -> [last block, loss]
              gradients <- leaves.grad  ||  <- [block 1] <- ... <- [loss, last block]

Block times: every block's forward and backward, measured in rounds over the whole chain.

A block alone and hot is 6 to 10 % too fast: here each runs on what the block before has just made, after all others
have used the caches. Gradients add to `.grad`s that are already there, as all microbatches of a batch but the first
do in training: the first allocates, or takes over, what the others then add to.

Split times: every block's p1 and p2 of 2BP, measured in rounds over the whole chain, and what is kept between them.

p2 comes after all blocks' p1, as it does in a pipeline: what it reads has left the caches by then.

Update cost: seconds that an optimizer's step, and the copy of a weight version, take for each byte of weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worker_agent.engine.backward import Split, add_weight_gradients
from worker_agent.engine.clocks import Clock
from worker_agent.models.data import Microbatch
from worker_agent.models.losses import Loss
from worker_agent.models.spec import user_code
from worker_agent.models.values import Value, as_values, carries_gradient

Direction = Literal["forward", "backward"]
Around = Callable[[Direction, int], AbstractContextManager[None]]
"""Entered around a block's forward and around its backward: where times are taken and saved tensors are seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCrossing:
    """One block's part of a passage: its inputs (leaves of its graph), the roots of its graph, what it gave."""

    inputs: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]
    output_bytes: int

    @property
    def input_bytes(self) -> int:
        """The bytes of all its inputs."""
        return sum(tensor.nbytes for tensor in self.inputs)


def pass_forward(
    blocks: Sequence[nn.Module], loss: Loss, inputs: Value, targets: Value, around: Around
) -> list[BlockCrossing]:
    """Runs every block on what the one before gave. The loss belongs to the last block, as it does to a last stage."""
    crossings: list[BlockCrossing] = []
    values = as_values(inputs)
    for index, block in enumerate(blocks):
        leaves = values if index == 0 else tuple(t.detach().requires_grad_(carries_gradient(t)) for t in values)
        last = index == len(blocks) - 1
        with user_code(_place(index, block)), around("forward", index):
            result = block(*leaves)
            values = as_values(result)
            roots = (loss(result, targets),) if last else values
        size_bytes = sum(tensor.nbytes for tensor in values)
        graded = tuple(t for t in roots if carries_gradient(t))
        crossings.append(BlockCrossing(inputs=leaves, roots=graded, output_bytes=size_bytes))
        del result, roots
    return crossings


def pass_backward(crossings: list[BlockCrossing], around: Around) -> None:
    """Runs every block's backward, last to first, and drops its crossing: weights' gradients add up in `.grad`."""
    gradients = tuple(torch.ones_like(root) for root in crossings[-1].roots)
    while crossings:
        crossing = crossings.pop()
        pairs = [(root, g) for root, g in zip(crossing.roots, gradients, strict=True) if root.requires_grad]
        with user_code(f"the backward of block {len(crossings)}"), around("backward", len(crossings)):
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        wanted = [leaf for leaf in crossing.inputs if carries_gradient(leaf)]
        gradients = tuple(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in wanted)


def _place(index: int, block: nn.Module) -> str:
    return f"block {index} ({type(block).__name__})"


@contextmanager
def nothing_around(direction: Direction, index: int) -> Iterator[None]:
    """An `Around` that does nothing."""
    yield


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """One block's seconds a microbatch, an entry a round."""

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
) -> tuple[BlockTimes, ...]:
    """Every block's times over `rounds`, after the warm-up. A round's microbatch is `microbatch(round)`.

    `before_round` is called untimed, with the number of the round: where several devices wait for each other.
    """
    parameters = prepare_gradients(blocks)
    measured: list[list[float]] = []
    for number in range(warm_up_rounds + rounds):
        inputs, targets = microbatch(number)
        if parameters:
            torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
        before_round(number)
        seconds = _round_s(blocks, loss, (inputs, targets), make_clock())
        if number >= warm_up_rounds:
            measured.append(seconds)
    return _by_block(measured, len(blocks))


def measure_without_graph(
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Callable[[int], Microbatch],
    *,
    rounds: int,
    make_clock: Callable[[], Clock],
) -> tuple[float, ...]:
    """The whole chain's forward seconds a round where no graph is kept: what a stage does that recomputes."""
    found = []
    for number in range(rounds + 1):
        clock = make_clock()
        inputs, targets = microbatch(number)
        clock.mark()
        with torch.no_grad():
            pass_forward(blocks, loss, inputs, targets, nothing_around)
        clock.mark()
        start_s, end_s = clock.seconds()
        found.append(end_s - start_s)
    return tuple(found[1:])


def prepare_gradients(blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Gives every trainable parameter a gradient of zeros; returns these parameters, each once."""
    parameters = list(dict.fromkeys(p for block in blocks for p in block.parameters() if p.requires_grad))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters


def _round_s(blocks: Sequence[nn.Module], loss: Loss, microbatch: Microbatch, clock: Clock) -> list[float]:
    """Durations in the order of execution: forwards first to last, then backwards last to first."""

    @contextmanager
    def timed(direction: Direction, index: int) -> Iterator[None]:
        clock.mark()
        yield
        clock.mark()

    pass_backward(pass_forward(blocks, loss, *microbatch, timed), timed)
    marks_s = list(clock.seconds())
    return [end_s - start_s for start_s, end_s in zip(marks_s[0::2], marks_s[1::2], strict=True)]


def _by_block(rounds: Sequence[Sequence[float]], blocks: int) -> tuple[BlockTimes, ...]:
    return tuple(
        BlockTimes(
            forward_s=tuple(seconds[index] for seconds in rounds),
            backward_s=tuple(seconds[2 * blocks - 1 - index] for seconds in rounds),
        )
        for index in range(blocks)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTimes:
    """One block's seconds a microbatch, an entry a round, and the bytes that it keeps from p1 to p2."""

    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    weight_gradient_bytes: int


def measure_split(
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Callable[[int], Microbatch],
    *,
    rounds: int,
    make_clock: Callable[[], Clock],
) -> tuple[SplitTimes, ...]:
    """Every block's split times over `rounds`, after one that does not count."""
    prepare_gradients(blocks)
    measured = [_round(blocks, loss, microbatch(number), make_clock()) for number in range(rounds + 1)][1:]
    return tuple(
        SplitTimes(
            backward_input_s=tuple(one.input_s[index] for one in measured),
            backward_weight_s=tuple(one.weight_s[index] for one in measured),
            weight_gradient_bytes=int(median(one.kept_bytes[index] for one in measured)),
        )
        for index in range(len(blocks))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """One round, by block."""

    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    kept_bytes: tuple[int, ...]


def _round(blocks: Sequence[nn.Module], loss: Loss, microbatch: Microbatch, clock: Clock) -> _Round:
    splits = [Split(block.parameters()) for block in blocks]

    @contextmanager
    def split(direction: Direction, index: int) -> Iterator[None]:
        backward = direction == "backward"
        with splits[index].active(deferring=backward):
            if backward:
                clock.mark()
            yield
            if backward:
                clock.mark()

    pass_backward(pass_forward(blocks, loss, *microbatch, split), split)
    kept_bytes = tuple(_kept_bytes(block, one) for block, one in zip(blocks, splits, strict=True))
    for one in reversed(splits):
        clock.mark()
        add_weight_gradients([one.deferred])
        clock.mark()
    marks_s = list(clock.seconds())
    seconds = [end_s - start_s for start_s, end_s in zip(marks_s[0::2], marks_s[1::2], strict=True)]
    last_to_first = len(blocks)
    return _Round(
        input_s=tuple(reversed(seconds[:last_to_first])),
        weight_s=tuple(reversed(seconds[last_to_first:])),
        kept_bytes=kept_bytes,
    )


def _kept_bytes(block: nn.Module, split: Split) -> int:
    owned = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers())}
    storages = {address: size for call in split.deferred for address, size in call.storages().items()}
    return sum(size for address, size in storages.items() if address not in owned)


SAMPLE_BYTES = 256 * 2**20
"""As many weights are enough to know the cost of a byte."""


def measure_update_s_per_byte(
    parameters: Sequence[nn.Parameter],
    make_optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
    *,
    rounds: int,
    make_clock: Callable[[], Clock],
    before_step: Callable[[int], None],
) -> float:
    """The median over some steps on these parameters; 0 where nothing is trained.

    `before_step` is called untimed with the number of the round: it makes the gradients, as a batch's last backward
    does, so that the caches are as a step finds them. The first step, which makes the optimizer's states, and the one
    after it, which has them for the first time, are not counted.
    """
    graded = [parameter for parameter in parameters if parameter.grad is not None]
    if not graded:
        return 0.0
    optimizer = make_optimizer(graded)
    steps_s = []
    for number in range(rounds + 2):
        before_step(number)
        steps_s.append(_timed_s(optimizer.step, make_clock()))
    return median(steps_s[2:]) / sum(parameter.nbytes for parameter in graded)


def measure_version_s_per_byte(
    parameters: Sequence[nn.Parameter],
    *,
    rounds: int,
    make_clock: Callable[[], Clock],
    before_copy: Callable[[int], None],
) -> float:
    """The median over some copies of the weights into another version's memory; 0 where nothing is trained."""
    sources = sampled([parameter.detach() for parameter in parameters])
    if not sources:
        return 0.0
    targets = [torch.empty_like(source) for source in sources]
    copies_s = []
    for number in range(rounds + 1):
        before_copy(number)
        copies_s.append(_timed_s(lambda: torch._foreach_copy_(targets, sources), make_clock()))
    return median(copies_s[1:]) / sum(source.nbytes for source in sources)


def sampled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The first tensors, as many as `SAMPLE_BYTES` hold, but one at least."""
    chosen: list[Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        if chosen and size_bytes + tensor.nbytes > SAMPLE_BYTES:
            break
        chosen.append(tensor)
        size_bytes += tensor.nbytes
    return chosen


def _timed_s(work: Callable[[], object], clock: Clock) -> float:
    clock.mark()
    work()
    clock.mark()
    start_s, end_s = clock.seconds()
    return end_s - start_s
