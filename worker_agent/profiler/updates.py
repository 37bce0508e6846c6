"""Updates: the time of an update of a stage's weights, from updates of single blocks and of all together.

Updates run the code of a run. Their time is not proportional to the bytes: many small tensors take longer than a large
one, and the first block after a backward finds neither code nor weights in the caches.

    stage = first + sum of its blocks
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from torch import Tensor, nn

from pipeplan.costs.memory import keeps_master_weights
from worker_agent.engine.clocks import Clock
from worker_agent.engine.optimizers import Optimizer
from worker_agent.engine.weights import Weights, find_slots
from worker_agent.profiler.times import timed_s

_LEARNING_RATE = 1e-6
"""So small that updates hardly change the model."""

_UNCOUNTED = 2
"""The first update creates the optimizer's states, and the second is the first to read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """Seconds of each block's part of an update, and those that every update takes, however few blocks a stage has."""

    blocks_s: tuple[float, ...]
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Updating:
    """How updates are measured.

    `before_step` is called untimed with the number of the round. It makes the gradients, as a batch's last backward
    does: the caches are then as a real update finds them. `afterwards` is timed: the work that follows an update.
    """

    optimizer: str
    dtype: str
    rounds: int
    make_clock: Callable[[], Clock]
    before_step: Callable[[int], None]
    afterwards: Callable[[Sequence[int]], object] = lambda blocks: None
    gradient_factor: Tensor | None = None


def measure_updates(blocks: Sequence[nn.Module], how: Updating) -> UpdateTimes:
    """The times of all blocks: medians over the rounds; 0 where nothing is trained."""
    numbers = [number for number, block in enumerate(blocks) if any(p.requires_grad for p in block.parameters())]
    if not numbers:
        return UpdateTimes(blocks_s=(0.0,) * len(blocks), first_s=0.0)
    (whole_s,) = zip(*_rounds(blocks, [numbers], how), strict=True)
    if len(numbers) == 1:
        return _spread_out(len(blocks), {numbers[0]: median(whole_s)}, first_s=0.0)

    # The first and the last block come first in turn: their extra time then is the cost of coming first.
    rounds = _rounds(blocks, [[number] for number in numbers], how)
    came_first = [-(number % 2) for number in range(len(rounds))]
    usual_s = []
    for place in range(len(numbers)):
        is_first = [first % len(numbers) == place for first in came_first]
        later = [each[place] for each, first in zip(rounds, is_first, strict=True) if not first]
        usual_s.append(median(later or [each[place] for each in rounds]))
    first_s = max(median(each[first] - usual_s[first] for each, first in zip(rounds, came_first, strict=True)), 0.0)
    call_s = max((sum(usual_s) + first_s - median(whole_s)) / (len(numbers) - 1), 0.0)  # a stage makes one call
    own_s = {number: max(seconds - call_s, 0.0) for number, seconds in zip(numbers, usual_s, strict=True)}
    return _spread_out(len(blocks), own_s, first_s=first_s + call_s)


def _spread_out(blocks: int, own_s: dict[int, float], *, first_s: float) -> UpdateTimes:
    return UpdateTimes(blocks_s=tuple(own_s.get(number, 0.0) for number in range(blocks)), first_s=first_s)


def _rounds(blocks: Sequence[nn.Module], parts: Sequence[Sequence[int]], how: Updating) -> list[list[float]]:
    """By counted round the seconds of the updates of some parts of the model, in order in one and backwards in the next
    round.
    """
    weights = [_weights([blocks[number] for number in part], how) for part in parts]
    found = []
    for number in range(_UNCOUNTED + how.rounds):
        for each in weights:
            each.grade(number)
        how.before_step(number)
        seconds = [0.0] * len(parts)
        for place in reversed(range(len(parts))) if number % 2 else range(len(parts)):
            if how.gradient_factor is not None:
                weights[place].scale_gradients(how.gradient_factor)
            seconds[place] = timed_s(partial(_update, weights[place], number + 1, parts[place], how), how.make_clock())
        found.append(seconds)
    return found[_UNCOUNTED:]


def _update(weights: Weights, version: int, blocks: Sequence[int], how: Updating) -> None:
    weights.update(version, keep_base=False)
    how.afterwards(blocks)


def _weights(blocks: Sequence[nn.Module], how: Updating) -> Weights:
    """The blocks' weights as a run has them."""
    every: list[Tensor] = [parameter for block in blocks for parameter in block.parameters()]
    for parameter in every:
        parameter.grad = None  # left by earlier measurements, in the weights' type; a run's may differ
    return Weights(
        find_slots(blocks, {parameter: str(place) for place, parameter in enumerate(every)}),
        Optimizer(how.optimizer, _LEARNING_RATE),
        master_weights=keeps_master_weights(how.dtype, None),
    )
