"""Status: where each rank is, in a small file that outlives it. A rank writes it, the launcher reads it."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_FORMAT = struct.Struct("<qqd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The index of the instruction that a rank is at (-1: none yet), batches done, and the newest batch's loss."""

    instruction: int
    batches_done: int
    loss: float


class StatusWriter:
    """A rank's own status, in memory shared with the file: a write costs about a microsecond and survives a kill."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_FORMAT.pack(-1, 0, float("nan")))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)

    def at(self, instruction: int) -> None:
        """The rank starts this instruction of its stream."""
        struct.pack_into("<q", self._memory, 0, instruction)

    def batch_done(self, batches_done: int, loss: float) -> None:
        """A batch is through on this rank."""
        struct.pack_into("<qd", self._memory, 8, batches_done, loss)


def read_status(path: Path) -> Status | None:
    """What a rank wrote last; None if it has not started."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _FORMAT.size:
        return None
    instruction, batches_done, loss = _FORMAT.unpack_from(content)
    return Status(instruction=instruction, batches_done=batches_done, loss=loss)
