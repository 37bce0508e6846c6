"""Noted: what a stage's modules have noted about the data, as a checkpoint needs it.

A schedule without a flush forwards microbatches of the next batch before the update that ends this one. What batch norm
noted of them is not of the checkpoint's batches: a resumed run forwards them again.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from planner_service.core.schedule.instructions import Checkpoint, Forward, Instruction


class Noted:
    """The buffers of one stage, live and, from a batch's end to its checkpoint, as they were at that end."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.live = buffers
        self._at_end: dict[str, Tensor] | None = None

    def keep(self) -> None:
        """A batch with a checkpoint is forwarded; the next forward is of a later batch."""
        self._at_end = {name: tensor.detach().clone() for name, tensor in self.live.items()}

    def take(self) -> Mapping[str, Tensor]:
        """What the checkpoint of that batch holds."""
        kept, self._at_end = self._at_end, None
        return self.live if kept is None else kept


def forwards_ahead(instructions: Sequence[Instruction], *, updates: int, batch_microbatches: int) -> dict[int, int]:
    """By its index in a rank's stream, every first forward beyond a batch whose checkpoint is still to come: its chunk.

    `updates` is the number of weight versions that a batch makes.
    """
    found: dict[int, int] = {}
    for end, checkpoint in enumerate(instructions):
        if isinstance(checkpoint, Checkpoint):
            last = checkpoint.version // updates * batch_microbatches
            first = _first_beyond(instructions, end, last, checkpoint.chunk)
            if first is not None:
                found[first] = checkpoint.chunk
    return found


def _first_beyond(instructions: Sequence[Instruction], end: int, last: int, chunk: int) -> int | None:
    """The first of a chunk's forwards before `end` that are beyond a microbatch. Forwards are in rising order."""
    first = None
    for index in reversed(range(end)):
        instruction = instructions[index]
        if isinstance(instruction, Forward) and instruction.chunk == chunk:
            if instruction.microbatch <= last:
                break
            first = index
    return first
