"""Update cost: seconds that an optimizer's step, and the copy of a weight version, take for each byte of weights."""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worker_agent.runtime.recorder import Clock

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
