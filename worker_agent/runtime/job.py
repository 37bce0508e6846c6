"""Job: the settings that all ranks of a run read, the files of the run, and the locks of its folder.

The launcher writes a `RunJob` to a file that all ranks read. `RunDirectory` names the files.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from platform import node

import torch
from torch import Tensor

from pipeplan.documents.engines import require_executable
from pipeplan.documents.identity import canonical_json, content_id
from pipeplan.documents.plan import Plan
from pipeplan.documents.records import read_record
from pipeplan.errors import InvalidInputError, RunFailedError, require, require_amount, require_count
from pipeplan.programs.communicate import AmongStages
from pipeplan.programs.program import Program, settled_batches
from pipeplan.protocol.training import (
    DEFAULT_RATES,
    FIRST_LOSS_SCALE,
    OptionChange,
    TrainingOptions,
    require_planned_autocast,
    share,
)
from pipeplan.schedules.registry import schedule_asked, schedule_named
from pipeplan.simulation.predict import long_program_of
from worker_agent.engine.results import DivergedError
from worker_agent.runtime.manifest import Manifest, commit, describe
from worker_agent.runtime.status import status_path, stop_path

_log = logging.getLogger(__name__)

RECORDED_INSTRUCTIONS = 10_000
"""The instructions recorded of all ranks together, at a run's start and again at its end: some 5 MB of trace each."""

STEPS, TRACE = "steps.csv", "trace.json"
DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "host", "nccl")

GROWTH_STEPS = 2000
"""The number of good updates in a row that double the loss scale, as in torch's GradScaler."""

LEAST = 2.0**-16
"""The smallest loss scale: a smaller one would not help a gradient that still overflows."""

LONGEST_TIMEOUT_S = 1e6
"""Sockets count milliseconds in 32 bits: at most 24 days."""

LEFT_OVER_S = 10.0
"""How long `holding` waits for the ranks of a run whose launcher was killed."""

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob(TrainingOptions):
    """An execution of a plan: batches [first_step, steps) of the data, from a seed or from a checkpoint.

    Everything that a run writes goes under `out`. `timeout_s` bounds every wait for another rank. `transport` is how
    GPUs' tensors travel: by NCCL ("auto"), or through the host by gloo, where several ranks may share a GPU.

    A run with more than twice `recorded_batches` batches records every instruction of that many batches at its start
    and at its end. None stands for as many as hold `RECORDED_INSTRUCTIONS`. `tied` are the groups of stages that share
    weights, which the ranks find. `changes` are the options that were changed where a run was resumed. `stop_step` is
    the last step of a run that a signal ends early (`stop`).
    """

    plan: Plan
    model: str
    data: str
    steps: int
    first_step: int = 0
    out: str
    device: str = "auto"
    transport: str = "auto"
    timeout_s: float = 300.0
    tied: tuple[tuple[int, ...], ...] = ()
    recorded_batches: int | None = None
    schedules: tuple[str, ...] = ()
    changes: tuple[OptionChange, ...] = ()
    stop_step: int | None = None

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)  # `slots` makes a new class, and `super` finds the old one
        require_executable(self.plan.engine)
        require_count("steps", self.steps)
        require_count("first_step", self.first_step, at_least=0)
        rule = f"must be above the {self.first_step} steps that the checkpoint has done"
        require(self.steps > self.first_step, "steps", rule, self.steps)
        rule = f"must be microbatch for {self.plan.schedule}, whose minibatches are not apart"
        apart = schedule_named(self.plan.schedule).flushes
        require(apart or self.batch_norm != "minibatch", "batch_norm", rule, self.batch_norm)
        rule = f"must be left out for a plan in {self.plan.dtype}: it is for those in float32"
        require(self.autocast is None or self.plan.dtype == "float32", "autocast", rule, self.autocast)
        require_planned_autocast(self.autocast, self.plan.autocast)
        require_amount("timeout_s", self.timeout_s, positive=True)
        rule = f"must be at most {LONGEST_TIMEOUT_S:,.0f}"
        require(self.timeout_s <= LONGEST_TIMEOUT_S, "timeout_s", rule, self.timeout_s)
        if self.recorded_batches is not None:
            require_count("recorded_batches", self.recorded_batches)
        require(self.device in DEVICES, "device", f"must be one of {', '.join(DEVICES)}", self.device)
        rule = f"must be one of {', '.join(TRANSPORTS)}"
        require(self.transport in TRANSPORTS, "transport", rule, self.transport)

    @property
    def computes_in(self) -> str | None:
        """The blocks' type under autocast: the requested one, or else that of the plan's profile."""
        return self.autocast or self.plan.autocast

    @property
    def first_loss_scale(self) -> float | None:
        """The loss scale at step 0; None for a run without one."""
        return FIRST_LOSS_SCALE if self.loss_scale is None and self.computes_in == "float16" else self.loss_scale

    @property
    def minibatch_statistics(self) -> bool:
        """Whether running statistics are those of whole minibatches."""
        return self.batch_norm == "minibatch" or (
            self.batch_norm is None and schedule_named(self.plan.schedule).minibatch_statistics
        )

    @property
    def largest_learning_rate(self) -> float:
        """The learning rate after the warm-up: the requested one, or the optimizer's default."""
        return DEFAULT_RATES[self.plan.optimizer] if self.learning_rate is None else self.learning_rate

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of the update of a step (from 0)."""
        return self.largest_learning_rate * share(
            self.lr_schedule, step, warmup_steps=self.warmup_steps, decay_steps=self.last_decay_step
        )

    @property
    def last_decay_step(self) -> int:
        """The step at which a learning rate that decays has become 0."""
        return self.steps if self.decay_steps is None else self.decay_steps

    @property
    def directory(self) -> "RunDirectory":
        return RunDirectory(root=Path(self.out))

    @property
    def batches(self) -> int:
        return (self.steps if self.stop_step is None else self.stop_step) - self.first_step

    @property
    def among_stages(self) -> AmongStages:
        return AmongStages(tied=self.tied, norm=self.clip_norm is not None or self.first_loss_scale is not None)

    def manifest(self, step: int) -> Manifest:
        """The description of a checkpoint after this many steps."""
        return Manifest(
            plan_id=content_id(self.plan),
            plan=describe(self.plan),
            model=self.model,
            data=self.data,
            seed=self.seed,
            step=step,
            steps=self.steps,
            next_sample=step * self.plan.batch_size,
            stages=self.plan.depth,
            batch_size=self.plan.batch_size,
        )

    def window(self, program: Program) -> int | None:
        """The number of batches at each end of the run whose instructions are all recorded; None: all batches.

        The number is large enough to fill the pipeline.
        """
        a_batch = sum(len(stream.instructions) for stream in program.streams) / self.batches
        asked = int(RECORDED_INSTRUCTIONS / a_batch) if self.recorded_batches is None else self.recorded_batches
        window = max(asked, settled_batches(program.pipeline) + 1)
        return window if self.batches > 2 * window else None

    def program(self) -> Program:
        """The ranks' program. The instructions of a long run are made when they are needed."""
        return long_program_of(
            self.plan,
            batches=self.batches,
            first_batch=self.first_step,
            checkpoint_every=self.checkpoint_every or self.stop_step or 0,
            among_stages=self.among_stages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """The files of a run.

    plan.json  timeline.json  run.json  steps.csv  trace.json  checkpoints/step-K/        for the user
    logs/rank-N.log                                  the output of each rank
    run.lock  ranks/alive                            locks (`holding`)
    ranks/job.json  ranks/stop                       between launcher and ranks, and of each rank:
    ranks/rank-N.status  rank-N.batches  rank-N.result.json  rank-N.failure.json
    """

    root: Path

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def ranks(self) -> Path:
        return self.root / "ranks"

    def of_others(self, plan: Path) -> Path | None:
        """A file that a run would overwrite, if no run was begun here. The run's own plan may be there."""
        from pipeplan.protocol.runs import PLAN, REPORT, TIMELINE  # and pydantic, which ranks do without

        if self.job.exists():
            return None
        there = (self.root / name for name in (PLAN, TIMELINE, REPORT, STEPS, TRACE))
        return next((file for file in there if file.exists() and file.resolve() != plan.resolve()), None)

    def log(self, rank: int) -> Path:
        return self.root / "logs" / f"rank-{rank}.log"

    def status(self, rank: int) -> Path:
        """A rank's status: its current instruction."""
        return status_path(self.ranks, rank)

    def result(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank}.result.json"

    def batches(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank}.batches"

    def failure(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank}.failure.json"

    @property
    def stop(self) -> Path:
        return stop_path(self.ranks)

    @property
    def job(self) -> Path:
        return self.ranks / "job.json"


def write_job(job: RunJob) -> Path:
    """Writes the job for its ranks, atomically; returns the path."""
    path = job.directory.job
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.part")
    aside.write_text(canonical_json(job), encoding="utf-8")
    commit(aside, path)
    return path


def read_job(path: Path) -> RunJob:
    """The job that `write_job` wrote, once the schedules that its starter named are loaded."""
    text = path.read_bytes()
    for reference in json.loads(text).get("schedules", ()):
        schedule_asked(reference)
    return read_record(RunJob, text)


class LossScale:
    """The loss scale of the next batches, the same on every rank; part of a checkpoint.

    It keeps small gradients within float16's range (Micikevicius et al. 2018, section 3.2). The loss is multiplied by
    it, and the gradients are divided by it before the update. All stages skip an update whose gradients overflow.
    """

    def __init__(self, initial: float) -> None:
        self.scale = initial
        self._good_steps = 0

    def grow(self) -> None:
        """Counts an update with finite gradients; GROWTH_STEPS of them in a row double the scale."""
        self._good_steps += 1
        if self._good_steps == GROWTH_STEPS:
            self.scale, self._good_steps = 2.0 * self.scale, 0

    def shrink(self) -> None:
        """Halves the scale after a skipped update. Raises DivergedError if no smaller scale would help."""
        self.scale, self._good_steps = self.scale / 2.0, 0
        if self.scale < LEAST:
            raise DivergedError(f"gradients overflow with a loss scale of {2.0 * self.scale:g}: they are not finite")

    def tensors(self) -> dict[str, Tensor]:
        """Its part of a checkpoint."""
        numbers = {"scale": self.scale, "good_steps": float(self._good_steps)}
        return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets it to the values of `tensors`. Raises InvalidInputError for a checkpoint without one."""
        require("scale" in tensors, "resume", "must be a checkpoint of a run with a loss scale", sorted(tensors))
        self.scale, self._good_steps = float(tensors["scale"]), int(tensors["good_steps"])


@contextmanager
def holding(root: Path) -> Iterator[None]:
    """Locks a run's folder for one launcher, and makes it if there is none.

        run.lock      an exclusive lock of the launcher; the file names the holder
        ranks/alive   a shared lock of all ranks, for as long as they live

    Ranks have a separate lock because they may outlive their launcher: for half a second if it is killed, without limit
    if a rank is stopped. The system releases a lock when its process ends.
    Raises InvalidInputError naming the holder where another run has the folder, and for a path that can be no folder;
    RunFailedError where the folder cannot be made for another reason.
    """
    try:
        (root / "ranks").mkdir(parents=True, exist_ok=True)
        descriptor = _open(root / "run.lock")
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise InvalidInputError("out", f"must be a folder that can be made: {error.strerror}", str(root)) from error
    except OSError as error:
        raise RunFailedError(f"cannot prepare the run's folder {root}: {error}") from error
    try:
        if not _take(descriptor, fcntl.LOCK_EX, root):
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            rule = f"must be free, and {holder or 'another run'} has it: wait for its end, or name another folder"
            raise InvalidInputError("out", rule, str(root))
        os.ftruncate(descriptor, 0)
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        os.pwrite(descriptor, f"process {os.getpid()} on {node()}, since {started}\n".encode(), 0)

        # Ranks of an earlier run may outlive their launcher.
        alive = _open(root / "ranks" / "alive")
        try:
            deadline_s = time.monotonic() + LEFT_OVER_S
            while not _take(alive, fcntl.LOCK_EX, root):
                if time.monotonic() > deadline_s:
                    rule = "must be free, and ranks of an earlier run, whose launcher is gone, still live"
                    raise InvalidInputError("out", f"{rule}: end them first", str(root))
                time.sleep(_LOOK_S)
        finally:
            os.close(alive)
        yield
    finally:
        os.close(descriptor)


def live_in(root: Path) -> None:
    """Shows that a rank of this folder's run is alive, until this process ends."""
    _take(_open(root / "ranks" / "alive"), fcntl.LOCK_SH, root)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _take(descriptor: int, kind: int, root: Path) -> bool:
    """Whether the lock was free. Warns if the file system has no locks: then no other run is kept out."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning("%s: the file system has no locks (%s): two runs in this folder would not be noticed", root, error)
    return True
