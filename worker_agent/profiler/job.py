"""Job: the files through which the launcher and profiling processes communicate.

The launcher writes the ProfileJob, which all processes read. The first rank adds a line to the progress file at every
step, and the launcher follows it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeplan.documents.files import dump, parse, read_text
from pipeplan.documents.names import STRICT
from pipeplan.documents.profile import require_autocast
from pipeplan.errors import require, require_unique
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.engine.processes import polling

CLOCKS = ("auto", "processor", "wall")
DEVICES = ("auto", "cpu", "cuda")

OnProgress = Callable[[int, int, str], None]
"""Called with the number of finished steps, of all steps, and the current work."""

_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """A task, and the choices of this node: the kind of device, and the clock.

    The clock "auto" takes CUDA events on a GPU and the processor time of the process on a core. "wall" is for blocks
    that wait without computing.
    """

    task: ProfileTask
    loss: str | None = None
    device: str = "auto"
    clock: str = "auto"

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require(self.device in DEVICES, "device", f"must be one of {', '.join(DEVICES)}", self.device)
        require(self.clock in CLOCKS, "clock", f"must be one of {', '.join(CLOCKS)}", self.clock)
        require_autocast(self.task.autocast, self.task.dtype)
        require_unique("microbatch_sizes", "must not name a size twice", self.task.microbatch_sizes)
        named = self.task.data is not None and self.task.sequence_length is not None
        rule = "is for random data: the data that is named has a length of its own"
        require(not named, "sequence_length", rule, self.task.sequence_length)
        alone = self.loss is not None and self.task.data is None
        require(not alone, "data", "must be named where a loss is named, so that its targets suit it", self.task.data)

    @property
    def steps(self) -> int:
        """The number of steps of its progress: the rounds of every size, the update, the links."""
        return len(self.task.microbatch_sizes) * (self.task.warm_up_rounds + self.task.rounds) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDirectory:
    """The files that launcher and profiling processes exchange."""

    root: Path

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def progress(self) -> Path:
        """One line for each step: `done total message`."""
        return self.root / "progress"

    def result(self, rank: int) -> Path:
        return self.root / f"rank-{rank}.result.json"

    def failure(self, rank: int) -> Path:
        return self.root / f"rank-{rank}.failure.json"


def write_job(directory: ProfileDirectory, job: ProfileJob) -> None:
    directory.job.write_text(dump(job), encoding="utf-8")


def read_job(directory: ProfileDirectory) -> ProfileJob:
    """The job that `write_job` wrote."""
    return parse(ProfileJob, read_text(directory.job))


class ProgressWriter:
    """Counts steps and writes them to the progress file. Ranks after the first write nothing."""

    def __init__(self, path: Path, *, rank: int, total: int) -> None:
        self._path = path if rank == 0 else None
        self._total = total
        self._done = 0

    def say(self, message: str) -> None:
        """Reports the current work."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{self._done} {self._total} {message}\n")

    def step(self, message: str) -> None:
        """Reports that a step is done, and the next one."""
        self._done += 1
        self.say(message)


@contextmanager
def following(path: Path, on_progress: OnProgress) -> Iterator[None]:
    """Calls `on_progress`, from a thread of its own, whenever the file has a new last line."""
    seen = ""

    def report() -> None:
        nonlocal seen
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole_lines = text[: text.rfind("\n") + 1].splitlines()
        line = whole_lines[-1] if whole_lines else ""
        if line and line != seen:
            seen = line
            done, total, message = line.split(" ", 2)
            on_progress(int(done), int(total), message)

    try:
        with polling(report, _INTERVAL_S, name="progress"):
            yield
    finally:
        report()
