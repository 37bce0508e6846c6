"""Block times: every block's forward and backward, measured in rounds over the whole chain.

A block alone and hot is 6 to 10 % too fast: here each runs on what the block before has just made, after all others
have used the caches. Gradients add to `.grad`s that are already there, as all microbatches of a batch but the first
do in training: the first allocates, or takes over, what the others then add to.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from worker_agent.models.data import Microbatch
from worker_agent.models.losses import Loss
from worker_agent.profiler.passage import Direction, nothing_around, pass_backward, pass_forward
from worker_agent.runtime.recorder import Clock


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
