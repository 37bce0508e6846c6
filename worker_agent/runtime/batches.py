"""Batches: what each batch of a rank came to, in a file that grows by a row a batch, so that the rank does not."""

import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from worker_agent.runtime.recorder import Spent
from worker_agent.runtime.status import StatusWriter

_ROW = np.dtype([("end_s", "<f8"), ("busy_s", "<f8"), ("loss", "<f8"), ("memory_bytes", "<i8")])

Rows = NDArray[np.void]
"""A row a batch: when it was through since the run's start, seconds of compute in it, its loss (NaN where the rank does
not compute it), and the most bytes held in it."""


class BatchLog:
    """Writes a rank's rows, and tells its status what they come to together."""

    def __init__(self, path: Path, status: StatusWriter, first_batch: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._status = status
        self._losses: dict[int, list[float]] = defaultdict(list)
        self._first = self._next = first_batch
        self._busy_s = 0.0
        self._peak_memory_bytes = 0

    def note_loss(self, batch: int, loss: float) -> None:
        """The loss of an update of a batch; a batch's is their mean."""
        self._losses[batch].append(loss)

    def add(self, spent: Spent) -> None:
        """The next batch is measured."""
        losses = self._losses.pop(self._next, None)
        loss = fmean(losses) if losses else math.nan
        row = np.array((spent.end_s, spent.busy_s, loss, spent.peak_memory_bytes), dtype=_ROW)
        self._file.write(row.tobytes())
        self._next += 1
        self._busy_s += spent.busy_s
        self._peak_memory_bytes = max(self._peak_memory_bytes, spent.peak_memory_bytes)
        self._status.measured(
            self._next - self._first,
            end_s=spent.end_s,
            busy_s=self._busy_s,
            memory_bytes=spent.memory_bytes,
            peak_memory_bytes=self._peak_memory_bytes,
        )

    def close(self) -> None:
        """All batches are done."""
        self._file.close()

    @property
    def busy_s(self) -> float:
        """Seconds of compute in all batches."""
        return self._busy_s

    @property
    def peak_memory_bytes(self) -> int:
        """The most that was held in any batch."""
        return self._peak_memory_bytes


def read_batches(path: Path) -> Rows:
    """All rows of a rank, read from the file as they are looked at."""
    return np.memmap(path, dtype=_ROW, mode="r")
