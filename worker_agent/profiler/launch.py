"""Launch: starts the profiling processes of this node through torchrun's own agent, and tells why they failed.

Measure: a model's profile, and this node as a cluster, by running the model on the node's devices.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import elastic_launch

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, PipeplanError, RunFailedError
from worker_agent.engine.results import RankFailure, invalid_input, read_failure
from worker_agent.engine.torchrun import one_node
from worker_agent.models.spec import parse_spec
from worker_agent.profiler.job import OnProgress, ProfileDirectory, ProfileJob, following, write_job
from worker_agent.profiler.results import RankFigures, cluster_of, profile_of, read_figures


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
        raise _explained(directory, error.failures, processes) from None
    except SignalException as error:
        raise KeyboardInterrupt from error
    found = [read_figures(directory.result(rank)) for rank in range(processes)]
    if None in found:
        raise RunFailedError(f"rank {found.index(None)} ended without a result", rank=found.index(None))
    return tuple(figures for figures in found if figures is not None)


def _explained(directory: ProfileDirectory, failures: Mapping[int, ProcessFailure], processes: int) -> PipeplanError:
    """The likeliest cause among the processes that ended; of several equally likely the one that ended first."""
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    codes |= {r: 0 for r in range(processes) if r not in codes and read_figures(directory.result(r)) is None}
    said = {rank: read_failure(directory.failure(rank)) for rank in codes}

    def innocence(rank: int) -> tuple[int, float, int]:
        ended_s = failures[rank].timestamp if rank in failures else 0.0
        return _innocence(codes[rank], said[rank]), ended_s, rank

    culprit = min(codes, key=innocence)
    words = said[culprit]
    if words is not None and words.kind == "input":
        return invalid_input(words)
    why = words.message if words is not None else _ending(directory, codes[culprit], culprit)
    return RunFailedError(f"profiling failed on rank {culprit}: {why}; log: {directory.logs}", rank=culprit)


def _innocence(exit_code: int, said: RankFailure | None) -> int:
    """The lower, the likelier the cause: wrong input, killed or ended as if all were done, failed and said why, failed
    without a word, lost a peer, ended by torchrun after another one.
    """
    if said is not None:
        return {"input": 0, "error": 2, "hung": 2, "peer": 4}[said.kind]
    if exit_code == -signal.SIGTERM:
        return 5
    return 3 if exit_code > 0 else 1


def _ending(directory: ProfileDirectory, exit_code: int, rank: int) -> str:
    if exit_code < 0:
        hint = ", as the kernel does when memory runs out" if exit_code == -signal.SIGKILL else ""
        return f"the process was killed by {signal.Signals(-exit_code).name}{hint}"
    said = _last_line(directory, rank) or "it printed nothing"
    return f"the process ended with exit status {exit_code} before its work was done ({said})"


def _last_line(directory: ProfileDirectory, rank: int) -> str:
    """The last line that a process wrote to its standard error: of a traceback, the error itself."""
    for log in directory.logs.glob(f"**/{rank}/stderr.log"):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return re.sub(r"^\[rank\d+\]: ?", "", lines[-1]).strip() if lines else ""
    return ""


def measure(job: ProfileJob, on_progress: OnProgress) -> tuple[Profile, Cluster]:
    """Profiles on all the job's devices at once, so that what they take from each other is in the figures.

    Raises InvalidInputError for a model, data or loss that cannot be, RunFailedError if a process fails: its logs are
    kept then, and the message says where.
    """
    _check_specs(job)
    directory = ProfileDirectory(root=Path(tempfile.mkdtemp(prefix="pipeplan-profile-")))
    write_job(directory, job)
    try:
        ranks = launch(directory, job.task.devices, on_progress)
    except (InvalidInputError, KeyboardInterrupt):
        shutil.rmtree(directory.root)
        raise
    shutil.rmtree(directory.root)
    return profile_of(job, ranks), cluster_of(ranks)


def _check_specs(job: ProfileJob) -> None:
    """Finds misspelt SPECs before any process is started."""
    for field, text in (("model", job.task.model), ("data", job.task.data), ("loss", job.loss)):
        if text is not None:
            parse_spec(text, field=field)
