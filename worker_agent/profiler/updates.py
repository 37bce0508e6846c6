"""Update cost: seconds that an optimizer's step takes for each byte of weights."""

from collections.abc import Callable, Sequence
from statistics import median

from torch import nn
from torch.optim import Optimizer

from worker_agent.runtime.recorder import Clock


def measure_update_s_per_byte(
    parameters: Sequence[nn.Parameter],
    make_optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
    *,
    rounds: int,
    make_clock: Callable[[], Clock],
) -> float:
    """The median over some steps on these parameters and the gradients that they have; 0 where nothing is trained.

    The step that makes the optimizer's states comes before, and is not counted.
    """
    graded = [parameter for parameter in parameters if parameter.grad is not None]
    if not graded:
        return 0.0
    optimizer = make_optimizer(graded)
    optimizer.step()
    steps_s = [_step_s(optimizer, make_clock()) for _ in range(rounds)]
    return median(steps_s) / sum(parameter.nbytes for parameter in graded)


def _step_s(optimizer: Optimizer, clock: Clock) -> float:
    clock.mark()
    optimizer.step()
    clock.mark()
    start_s, end_s = clock.seconds()
    return end_s - start_s
