"""Launch: starts the profiling processes of this node through torchrun's own agent, and tells why they failed."""

import os
import re
import signal
import sys
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import elastic_launch

from planner_service.core.errors import PipeplanError, RunFailedError
from worker_agent.profiler.job import ProfileDirectory
from worker_agent.profiler.progress import OnProgress, following
from worker_agent.profiler.results import RankFigures, read_figures
from worker_agent.runtime.results import invalid_input, read_failure
from worker_agent.torchrun import one_node


def launch(directory: ProfileDirectory, processes: int, on_progress: OnProgress) -> tuple[RankFigures, ...]:
    """Runs the job in the directory on so many processes; returns what they measured, by rank.

    Raises the InvalidInputError that a process found, or RunFailedError with the last line of the log of the process
    that failed first. No process is left when it returns.
    """
    logs = DefaultLogsSpecs(log_dir=str(directory.logs), redirects=Std.ALL)
    try:
        with following(directory.progress, on_progress):
            start = elastic_launch(one_node(processes, logs), sys.executable)
            start("-m", "worker_agent.profiler.rank", str(directory.root), str(os.getpid()))
    except ChildFailedError as error:
        raise _explained(directory, error.failures) from None
    except SignalException as error:
        raise KeyboardInterrupt from error
    found = [read_figures(directory.result(rank)) for rank in range(processes)]
    if None in found:
        raise RunFailedError(f"rank {found.index(None)} ended without a result", rank=found.index(None))
    return tuple(figures for figures in found if figures is not None)


def _explained(directory: ProfileDirectory, failures: Mapping[int, ProcessFailure]) -> PipeplanError:
    """The likeliest cause among the processes that ended: what one said itself, else the first that was not stopped."""
    said = {rank: failure for rank in failures if (failure := read_failure(directory.failure(rank)))}
    for rank, failure in sorted(said.items()):
        if failure.kind == "input":
            return invalid_input(failure)
        return RunFailedError(f"profiling failed on rank {rank}: {failure.message}", rank=rank)
    rank = min(failures, key=lambda r: (failures[r].exitcode == -signal.SIGTERM, failures[r].timestamp, r))
    return RunFailedError(f"profiling failed on rank {rank}: {_ending(directory, failures[rank], rank)}", rank=rank)


def _ending(directory: ProfileDirectory, failure: ProcessFailure, rank: int) -> str:
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = ", as the kernel does when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        return f"the process was killed by {name}{hint}; log: {directory.logs}"
    return f"{_last_line(directory, rank) or f'exit status {failure.exitcode}'}; log: {directory.logs}"


def _last_line(directory: ProfileDirectory, rank: int) -> str:
    """The last line that a process wrote to its standard error: of a traceback, the error itself."""
    for log in directory.logs.glob(f"**/{rank}/stderr.log"):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return re.sub(r"^\[rank\d+\]: ?", "", lines[-1]).strip() if lines else ""
    return ""
