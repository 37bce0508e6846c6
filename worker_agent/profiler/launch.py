"""Launch: starts the profiling processes of this node through torchrun's own agent, and tells why they failed."""

import ast
import logging
import re
import signal
import sys
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from planner_service.core.errors import InvalidInputError, PipeplanError, RunFailedError
from worker_agent.profiler.job import ProfileDirectory
from worker_agent.profiler.progress import OnProgress, following
from worker_agent.profiler.results import RankFigures, read_figures
from worker_agent.runtime.results import RankFailure, read_failure


def launch(directory: ProfileDirectory, processes: int, on_progress: OnProgress) -> tuple[RankFigures, ...]:
    """Runs the job in the directory on so many processes; returns what they measured, by rank.

    Raises the InvalidInputError that a process found, or RunFailedError with the last line of the log of the process
    that failed first. No process is left when it returns.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with following(directory.progress, on_progress):
            start = elastic_launch(_config(directory, processes), sys.executable)
            start("-m", "worker_agent.profiler.rank", str(directory.root))
    except ChildFailedError as error:
        raise _explained(directory, error.failures) from None
    except SignalException as error:
        raise KeyboardInterrupt from error
    found = [read_figures(directory.result(rank)) for rank in range(processes)]
    if None in found:
        raise RunFailedError(f"rank {found.index(None)} ended without a result", rank=found.index(None))
    return tuple(figures for figures in found if figures is not None)


def _config(directory: ProfileDirectory, processes: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        run_id="pipeplan-profile",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=str(directory.logs), redirects=Std.ALL),
    )


def _explained(directory: ProfileDirectory, failures: Mapping[int, ProcessFailure]) -> PipeplanError:
    """The likeliest cause among the processes that ended: what one said itself, else the first that was not stopped."""
    said = {rank: failure for rank in failures if (failure := read_failure(directory.failure(rank)))}
    for rank, failure in sorted(said.items()):
        if failure.kind == "input":
            return _invalid_input(failure)
        return RunFailedError(f"profiling failed on rank {rank}: {failure.message}", rank=rank)
    rank = min(failures, key=lambda r: (failures[r].exitcode == -signal.SIGTERM, failures[r].timestamp, r))
    return RunFailedError(f"profiling failed on rank {rank}: {_ending(directory, failures[rank], rank)}", rank=rank)


def _invalid_input(failure: RankFailure) -> InvalidInputError:
    try:
        value = ast.literal_eval(failure.value or "None")
    except (ValueError, SyntaxError):
        value = failure.value
    return InvalidInputError(failure.field or "model", failure.rule or failure.message, value)


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
