"""ProfileJob: everything that a profiling process is told. The launcher writes it to a file that all of them read."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeplan.documents.files import dump, parse, read_text
from pipeplan.documents.profile import STRICT
from pipeplan.errors import require, require_unique
from pipeplan.protocol.jobs import ProfileTask

CLOCKS = ("auto", "processor", "wall")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """A task, and what only this node can choose: the kind of device, and the clock.

    `clock` "auto" takes CUDA events on a GPU and the processor time of the process on a core; "wall" is for blocks
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
        require_unique("microbatch_sizes", "must not name a size twice", self.task.microbatch_sizes)
        alone = self.loss is not None and self.task.data is None
        require(not alone, "data", "must be named where a loss is named, so that its targets suit it", self.task.data)

    @property
    def steps(self) -> int:
        """How many steps of progress it reports: the rounds of every size, the update, the links."""
        return len(self.task.microbatch_sizes) * (self.task.warm_up_rounds + self.task.rounds) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDirectory:
    """The files that launcher and profiling processes tell each other things by."""

    root: Path

    @property
    def job(self) -> Path:
        """The ProfileJob."""
        return self.root / "job.json"

    @property
    def logs(self) -> Path:
        """What the processes printed, in folders of torchrun's making."""
        return self.root / "logs"

    @property
    def progress(self) -> Path:
        """A line a step: `done total message`."""
        return self.root / "progress"

    def result(self, rank: int) -> Path:
        """What a process measured."""
        return self.root / f"rank-{rank}.result.json"

    def failure(self, rank: int) -> Path:
        """Why a process gave up."""
        return self.root / f"rank-{rank}.failure.json"


def write_job(directory: ProfileDirectory, job: ProfileJob) -> None:
    """Writes the job where the processes find it."""
    directory.job.write_text(dump(job), encoding="utf-8")


def read_job(directory: ProfileDirectory) -> ProfileJob:
    """The job that `write_job` wrote."""
    return parse(ProfileJob, read_text(directory.job))
