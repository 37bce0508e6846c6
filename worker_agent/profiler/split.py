"""Split times: every block's p1 and p2 of 2BP, measured in rounds over the whole chain, and what is kept between them.

p2 comes after all blocks' p1, as it does in a pipeline: what it reads has left the caches by then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from torch import nn

from worker_agent.models.data import Microbatch
from worker_agent.models.losses import Loss
from worker_agent.profiler.blocks import prepare_gradients
from worker_agent.profiler.passage import Direction, pass_backward, pass_forward
from worker_agent.runtime.backward import Split, add_weight_gradients
from worker_agent.runtime.recorder import Clock


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
