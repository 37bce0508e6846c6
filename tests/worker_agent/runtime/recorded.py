"""Data that notes what is read of it, for tests of where a run goes on."""

import os
from pathlib import Path

from torch import Tensor

from worker_agent.models.presets import regression
from worker_agent.models.samples import Samples


class Recorded:
    """Samples that note the number of every microbatch that is read, a file a process."""

    def __init__(self, samples: Samples, folder: Path) -> None:
        self._samples = samples
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self) -> int:
        return 2**40  # so that a number is seen as it was asked for

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        os.write(self._file, f"{index}\n".encode())
        return self._samples[index % len(self._samples)]


def recorded(*, microbatch_size: int, seed: int, folder: str, width: int = 8) -> Recorded:
    """Regression data; the numbers of the microbatches that are read stand in the folder, `reads_of` a process."""
    return Recorded(regression(microbatch_size=microbatch_size, seed=seed, width=width), Path(folder))


def reads_of(folder: Path, process: int) -> list[int] | None:
    """What a process has read, in order; None if it has opened no data."""
    file = folder / str(process)
    return [int(line) for line in file.read_text().split()] if file.exists() else None
