"""Turns: the order of work of a rank with two stages in a V, by kind of work and chunk only.

Each kind takes the microbatches of a chunk one after another, so the order of turns determines everything.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from pipeplan.programs.instructions import BackwardInput, BackwardWeight, Forward, Instruction, Update

Turn: TypeAlias = tuple[type[Forward | BackwardInput | BackwardWeight], int]
"""A kind of work and the chunk that it is for."""

F0, F1 = ((Forward, chunk) for chunk in range(2))
I0, I1 = ((BackwardInput, chunk) for chunk in range(2))
W0, W1 = ((BackwardWeight, chunk) for chunk in range(2))


def batch_in_turn(turns: Iterable[Turn], numbers: Sequence[int], batch: int) -> Iterator[Instruction]:
    """A batch of these microbatches on version `batch`, and the updates. Turns beyond the last microbatch are empty."""
    taken = Counter[Turn]()
    for turn in turns:
        place = taken[turn]
        taken[turn] += 1
        if place < len(numbers):
            kind, chunk = turn
            k = numbers[place]
            yield BackwardWeight((k,), batch, chunk) if issubclass(kind, BackwardWeight) else kind(k, batch, chunk)
    yield from (Update(batch + 1, chunk) for chunk in range(2))
