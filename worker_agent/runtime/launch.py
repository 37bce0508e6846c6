"""Launch: starts a run's ranks on this node through torchrun's own agent, watches them, and tells who failed."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import elastic_launch

from planner_service.core.errors import InvalidInputError, RunFailedError
from planner_service.core.predict import program_of
from planner_service.core.schedule.program import Program
from planner_service.core.schedule.text import format_instruction
from worker_agent.runtime.hung import hunting
from worker_agent.runtime.job import RunJob, write_job
from worker_agent.runtime.results import RankFailure, RankResult, invalid_input, read_failure, read_result
from worker_agent.runtime.status import read_status
from worker_agent.runtime.watch import watching
from worker_agent.torchrun import one_node

Progress = Callable[[int, float], None]
"""Called with the batches done and the newest loss while a run goes on."""


def launch(job: RunJob, on_progress: Progress) -> tuple[RankResult, ...]:
    """Runs the job to its end; returns the ranks' results, by rank.

    Raises RunFailedError naming the rank that failed first, its instruction and its log, or the InvalidInputError
    that a rank found. No process is left when it returns.
    """
    program = program_of(
        job.plan, batches=job.batches, first_batch=job.first_step, checkpoint_every=job.checkpoint_every
    )
    path = write_job(job)
    directory = job.directory
    for stale in (*directory.ranks.glob("rank-*"), *directory.root.glob("logs/rank-*.log")):
        stale.unlink()
    try:
        with watching(job, on_progress), hunting(job, program, range(job.plan.workers)):
            start = elastic_launch(one_node(job.plan.workers), sys.executable)
            start("-m", "worker_agent.runtime.start", str(path), str(os.getpid()))
    except ChildFailedError as error:
        raise _culprit(job, program, error.failures) from None
    except SignalException as error:
        raise KeyboardInterrupt from error
    found = [read_result(directory.result(rank)) for rank in range(job.plan.workers)]
    missing = [rank for rank, result in enumerate(found) if result is None]
    if missing:
        raise RunFailedError(f"rank {missing[0]} ended without a result; log: {directory.log(missing[0])}")
    return tuple(result for result in found if result is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How one rank ended: the code of its process, and what it said."""

    rank: int
    exit_code: int
    said: RankFailure | None

    @property
    def hung(self) -> bool:
        """Whether the launcher ended it."""
        return self.said is not None and self.said.kind == "hung"

    @property
    def suspicion(self) -> int:
        """The higher, the likelier the cause: hung, killed from outside, failed by itself, lost a peer."""
        if self.hung:
            return 4
        if self.exit_code < 0 and self.exit_code != -signal.SIGTERM:
            return 3
        if self.said is None:
            return 1
        return 0 if self.said.kind == "peer" else 2


def _culprit(
    job: RunJob, program: Program, failures: Mapping[int, ProcessFailure]
) -> RunFailedError | InvalidInputError:
    ends = [
        _End(rank=rank, exit_code=failure.exitcode, said=read_failure(job.directory.failure(rank)))
        for rank, failure in failures.items()
    ]
    worst = max(ends, key=lambda end: (end.suspicion, -end.rank))
    if worst.said is not None and worst.said.kind == "input":
        return invalid_input(worst.said)
    log = job.directory.log(worst.rank)
    return RunFailedError(
        f"{_name(program, worst.rank)} {_ending(worst, log)} {_place(job, program, worst.rank)}; log: {log}",
        rank=worst.rank,
    )


def _name(program: Program, rank: int) -> str:
    stream = program.streams[rank]
    return f"rank {rank} (stage {stream.stage}, replica {stream.replica})"


def _ending(end: _End, log: Path) -> str:
    if end.said is not None and end.hung:
        return end.said.message
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        hint = ", as the kernel does when memory runs out," if end.exit_code == -signal.SIGKILL else ""
        return f"was killed by {name}{hint}"
    if end.said is None:
        return f"ended with exit status {end.exit_code} ({_last_line(log)})"
    return f"failed ({end.said.message})"


def _last_line(log: Path) -> str:
    """The last line that a rank printed: of a traceback, the error itself."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _place(job: RunJob, program: Program, rank: int) -> str:
    status = read_status(job.directory.status(rank))
    if status is None or status.instruction < 0:
        return "while it started"
    instruction = program.streams[rank].instructions[status.instruction]
    return f"at {format_instruction(instruction)} after {max(status.batches_done, job.first_step)} of {job.steps} steps"
