"""Launch: starts a run's ranks on this node through torchrun's own agent, watches them, and reports failures."""

import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch

from pipeplan.errors import EndedBySignalError, InvalidInputError, RunFailedError
from pipeplan.programs.program import Program
from pipeplan.programs.text import format_instruction
from worker_agent.engine.processes import OtherNodeError, Place
from worker_agent.engine.results import DivergedError, RankFailure, RankResult, invalid_input, read_failure, read_result
from worker_agent.engine.torchrun import node_of
from worker_agent.models.spec import described
from worker_agent.runtime.hung import hunting
from worker_agent.runtime.job import RunJob, read_job, write_job
from worker_agent.runtime.manifest import clear
from worker_agent.runtime.measured import logging_steps
from worker_agent.runtime.status import ENDING, MEETING, STARTING, Activity, holdup, read_status
from worker_agent.runtime.stop import require_not_stopped
from worker_agent.runtime.watch import OnProgress, watching

_LOOK_S = 0.1
_SEEN_WITHIN = 600
"""How often a file of another node is tried."""


def launch(job: RunJob, on_progress: OnProgress, place: Place | None = None) -> tuple[RankResult, ...]:
    """Runs the job to its end. Returns the ranks' results, by rank.

    Of several nodes the first one calls this; the others `join`. All see the job's folder.

    Raises RunFailedError naming the rank that failed first, its instruction and its log, or the InvalidInputError that
    a rank found; DivergedError for numbers that are not finite; OtherNodeError if the cause is on another node;
    EndedBySignalError after a checkpoint that a signal requested. No process is left when it returns.
    """
    directory = job.directory
    with ExitStack() as stack:
        try:
            path = write_job(job)
            for stale in (*directory.ranks.glob("rank-*"), *directory.root.glob("logs/rank-*.log")):
                stale.unlink()
            clear(directory.checkpoints, after=job.first_step)
            stack.enter_context(logging_steps(job))
        except OSError as error:
            raise RunFailedError(f"cannot prepare the run's folder {directory.root}: {error}") from error
        _run_ranks(job, path, on_progress, place)

    found: list[RankResult | None] = []
    pause = threading.Event()
    for rank in range(job.plan.workers):
        # Over the network a file of another node may take a while to appear.
        for _ in range(_SEEN_WITHIN if place else 0):
            if directory.result(rank).exists():
                break
            pause.wait(_LOOK_S)
        found.append(read_result(directory.result(rank)))
    missing = [rank for rank, result in enumerate(found) if result is None]
    if missing:
        why = f"rank {missing[0]} ended without a result; log: {directory.log(missing[0])}"
        raise RunFailedError(why, rank=missing[0])
    results = tuple(result for result in found if result is not None)
    require_not_stopped(directory, results[0].stop_step, job.steps)
    return results


def join(job: RunJob, on_progress: OnProgress, place: Place) -> None:
    """Runs this node's ranks of a job that the first node has written into the folder. Raises as `launch` does."""
    _run_ranks(job, job.directory.job, on_progress, place)
    own = read_result(job.directory.result(place.ranks(job.plan.workers // place.nodes)[0]))
    require_not_stopped(job.directory, own.stop_step if own else None, job.steps)


def _run_ranks(job: RunJob, path: Path, on_progress: OnProgress, place: Place | None) -> None:
    processes = job.plan.workers // (place.nodes if place else 1)
    here = place.ranks(processes) if place else range(processes)
    try:
        with watching(job, on_progress, here), hunting(job, here):
            config = node_of(place, processes)
            config.signals_to_handle = "SIGHUP,SIGQUIT"  # `heeding_signals` has the others
            start = elastic_launch(config, sys.executable)
            start("-m", "worker_agent.runtime.start", str(path), str(os.getpid()))
    except ChildFailedError as error:
        begun = replace(read_job(path), out=job.out)  # only now is it known where the first node began
        raise _culprit(begun, error.failures, here, place) from None
    except SignalException as error:
        raise EndedBySignalError(f"ended at once by {error.sigval.name}", error.sigval) from error
    except (DistError, RendezvousError) as error:
        if place is None:
            raise
        raise OtherNodeError(f"the nodes did not meet at {place.address}:{place.port}: {described(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How one rank ended: its process's exit code, and its error."""

    rank: int
    exit_code: int
    said: RankFailure | None

    @property
    def hung(self) -> bool:
        return self.said is not None and self.said.kind == "hung"

    @property
    def left(self) -> bool:
        """Whether its process ended as if all were done, which it was not."""
        return self.exit_code == 0 and self.said is None

    @property
    def suspicion(self) -> int:
        """How likely a rank is the cause, in rising order: it lost a peer; it was ended by SIGTERM (as torchrun ends
        the others); it failed by itself; it hung, was killed, or ended as if all were done.
        """
        if self.hung:
            return 4
        if self.left or (self.exit_code < 0 and self.exit_code != -signal.SIGTERM):
            return 3
        if self.said is None:
            return 2 if self.exit_code > 0 else 1
        return 0 if self.said.kind == "peer" else 2


def _culprit(
    job: RunJob, failures: Mapping[int, ProcessFailure], here: Iterable[int], place: Place | None
) -> RunFailedError | InvalidInputError:
    """The launcher's error once a rank has failed: it names the likeliest cause, and that rank's position.

    Ranks that torchrun does not count among the failed ones have ended with status 0.
    """
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    codes |= {rank: 0 for rank in here if rank not in codes and not job.directory.result(rank).exists()}
    ends = [
        _End(rank=rank, exit_code=code, said=read_failure(job.directory.failure(rank))) for rank, code in codes.items()
    ]
    worst = max(ends, key=lambda end: end.suspicion)  # of several the first one that torchrun found failed
    if worst.said is not None and worst.said.kind == "input":
        return invalid_input(worst.said)
    program = job.program()
    if place is None and ends[0].suspicion == 0 and worst.suspicion <= 1:
        worst = _late(job, program, ends) or worst

    stream, log = program.streams[worst.rank], job.directory.log(worst.rank)
    status = read_status(job.directory.status(worst.rank))
    if status is None or status.instruction in (STARTING, MEETING):
        at = "while it started"
    else:
        ending = status.instruction == ENDING
        where = "its end" if ending else format_instruction(stream.instructions[status.instruction])
        at = f"at {where} after {max(status.batches_done, job.first_step)} of {job.steps} steps"
    name = f"rank {worst.rank} (stage {stream.stage}, replica {stream.replica})"
    elsewhere = place is not None and (worst.suspicion == 0 or worst.exit_code == -signal.SIGTERM)
    diverged = worst.said is not None and worst.said.kind == "diverged"
    return (OtherNodeError if elsewhere else DivergedError if diverged else RunFailedError)(
        f"{name} {_ending(worst, log)} {at}; log: {log}", rank=worst.rank
    )


def _late(job: RunJob, program: Program, ends: Sequence[_End]) -> _End | None:
    """If no rank failed by itself, the one that has worked longest without waiting: the others waited for it."""
    since_s = {}
    for end in ends:
        status = read_status(job.directory.status(end.rank))
        if status is None:
            since_s[end.rank] = 0.0
        elif holdup(status, program.streams[end.rank].instructions).activity is not Activity.PEER:
            since_s[end.rank] = status.started_s
    if not since_s:
        return None
    late = min(since_s, key=lambda rank: since_s[rank])
    said = RankFailure(kind="hung", message="kept the others waiting for too long")
    return next(replace(end, said=said) for end in ends if end.rank == late)


def _ending(end: _End, log: Path) -> str:
    """How a rank ended, in the words of the error."""
    if end.said is not None and end.hung:
        return end.said.message
    if end.exit_code < 0 and (end.said is None or end.exit_code != -signal.SIGTERM):
        name = signal.Signals(-end.exit_code).name
        hint = ", as the kernel does when memory runs out," if end.exit_code == -signal.SIGKILL else ""
        return f"was killed by {name}{hint}"
    if end.left:
        return f"ended its process with exit status 0 before its work was done ({_last_line(log)})"
    if end.said is None:
        return f"ended with exit status {end.exit_code} ({_last_line(log)})"
    return f"failed ({end.said.message})"


def _last_line(log: Path) -> str:
    """The last line that a rank printed: of a traceback, the error itself."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
