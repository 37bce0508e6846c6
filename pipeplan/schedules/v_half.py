"""V-Half (Qi et al., Pipeline Parallelism with Controllable Memory, 2024): two stages a rank, half of 1F1B's memory.

A microbatch's work, laid out over all ranks, is a building block. The next one's begins 6 slots later, the slots that a
rank needs for a microbatch. A rank keeps activations from the forward to the gradients of the weights. In this block
microbatches come to the last rank at half speed and go back to the first one at full speed, forward and backward. So a
rank that keeps one stage's activations for longer keeps the other's for shorter. With 3 ranks:

rank 0   F                           F.1 I.1                             I
rank 1           F               F.1             I.1                 I
rank 2                   F   F.1                         I.1     I

A rank does this work in this order, each piece as soon as it can, and the weights' gradients wherever it would wait, or
has reached its memory limit. The paper lays these out too, in the remaining slots, then compacts the whole and reorders
its beginning and its end.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

from pipeplan.documents.plan import Worker
from pipeplan.programs.instructions import BackwardInput, BackwardWeight, Forward, Instruction
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.v_turns import F0, F1, I0, I1, Turn, batch_in_turn

_Work: TypeAlias = tuple[type[object], int]
"""A kind of work and its stage."""

_KEPT = {Forward: 1, BackwardInput: 0, BackwardWeight: -1}
"""The change of a rank's kept microbatches of a stage by a piece of work."""


class VHalf(Schedule):
    """Half of 1F1B's activations on ranks with two stages in a V."""

    name = "v-half"
    source = "Qi et al., Pipeline Parallelism with Controllable Memory, 2024"
    flushes = True
    splits_backward = True
    chunked = True
    v_shaped = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Batch t runs on version t. A rank keeps p + 2 microbatches of a stage (p + 1 where p is odd), 1F1B's 2p.

        Where forward, gradient of the input and of the weights of a stage take a second each, the bubble of m >= p
        microbatches is 3 (p - 1) seconds (one less where p > 1 is odd), and 1F1B's is 6 (p - 1).
        """
        for batch in pipeline.batch_range():
            numbers = pipeline.microbatches_of(worker, batch)
            yield from batch_in_turn(_turns(pipeline.span, len(numbers))[worker.stage], numbers, batch)

    def idle_steps(self, *, ranks: int, chunks: int) -> float:
        """Half a step for each rank after the first, where F, I and W are equal."""
        del chunks
        return (ranks - 1) / 2


@lru_cache(maxsize=64)
def _turns(ranks: int, microbatches: int) -> Sequence[Sequence[Turn]]:
    """All ranks' turns, slot by slot. Takes O(ranks microbatches) for the slots."""
    most = ranks + 2 - ranks % 2
    kept = [0] * ranks
    laid_out = [deque(_laid_out(ranks, rank, microbatches)) for rank in range(ranks)]
    waiting = [deque[Turn]() for _ in range(ranks)]
    turns: list[list[Turn]] = [[] for _ in range(ranks)]
    done = Counter[_Work]()

    def is_ready(rank: int) -> bool:
        if not laid_out[rank]:
            return False
        kind, chunk = laid_out[rank][0]
        stage = _stage(ranks, rank, chunk)
        before = _before(ranks, kind, stage)
        return (before is None or done[before] > done[kind, stage]) and (kind is not Forward or kept[rank] < most)

    while any(laid_out) or any(waiting):
        slot: list[tuple[int, Turn]] = []
        for rank in range(ranks):
            if is_ready(rank):
                slot.append((rank, laid_out[rank].popleft()))
            elif waiting[rank]:
                slot.append((rank, waiting[rank].popleft()))
        for rank, turn in slot:
            kind, chunk = turn
            turns[rank].append(turn)
            done[kind, _stage(ranks, rank, chunk)] += 1
            kept[rank] += _KEPT[kind]
            if kind is BackwardInput:
                waiting[rank].append((BackwardWeight, chunk))
    return turns


def _stage(ranks: int, rank: int, chunk: int) -> int:
    return 2 * ranks - 1 - rank if chunk else rank


def _before(ranks: int, kind: type[object], stage: int) -> _Work | None:
    """The work that precedes this for a microbatch; None before its first forward."""
    last = 2 * ranks - 1
    if kind is Forward:
        return (Forward, stage - 1) if stage > 0 else None
    return (BackwardInput, stage + 1) if stage < last else (Forward, last)


def _laid_out(ranks: int, rank: int, microbatches: int) -> list[Turn]:
    """The rank's forwards and gradients of inputs in the order of the repeated blocks."""
    pause = 0 if ranks % 2 else 3  # before the backward: else two pieces of work would meet in a slot
    block: dict[Turn, int] = {
        F0: 2 * rank,
        F1: 3 * ranks - 2 - rank,
        I1: 3 * ranks - 1 + pause + 2 * rank,
        I0: 6 * ranks - 2 + pause - rank,
    }
    starts = [(start + 6 * k, turn) for turn, start in block.items() for k in range(microbatches)]
    return [turn for _, turn in sorted(starts, key=lambda each: each[0])]
