"""Launch: measures a model's profile, and this node as a cluster, by running the model on the node's devices.

torchrun's own agent starts one profiling process for each device. Where processes fail, the error names the likeliest
cause among them.
"""

import logging
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
from worker_agent.engine.results import invalid_input, read_failure
from worker_agent.engine.torchrun import one_node
from worker_agent.models.spec import parse_spec
from worker_agent.profiler.job import OnProgress, ProfileDirectory, ProfileJob, following, write_job
from worker_agent.profiler.results import RankFigures, cluster_of, profile_of, read_figures

_log = logging.getLogger(__name__)


def measure(job: ProfileJob, on_progress: OnProgress) -> tuple[Profile, Cluster]:
    """Profiles on all the job's devices at once: the figures include their mutual slowdown.

    Raises InvalidInputError for a model, data or loss that is not possible, and RunFailedError if a process fails. The
    logs are then kept, and the message names their folder.
    """
    for field, text in (("model", job.task.model), ("data", job.task.data), ("loss", job.loss)):
        if text is not None:
            parse_spec(text, field=field)  # finds a misspelt SPEC before any process is started
    directory = ProfileDirectory(root=Path(tempfile.mkdtemp(prefix="pipeplan-profile-")))
    write_job(directory, job)
    try:
        ranks = launch(directory, job.task.devices, on_progress)
    except (InvalidInputError, KeyboardInterrupt):
        shutil.rmtree(directory.root)
        raise
    shutil.rmtree(directory.root)
    names = ranks[0].block_names
    for index, name in enumerate(names):
        if any(size[index].uncounted for figures in ranks for size in figures.sizes):
            _log.warning("block %d (%s) keeps bytes that cannot be counted: the profile is without them", index, name)
    return profile_of(job, ranks), cluster_of(ranks)


def launch(directory: ProfileDirectory, processes: int, on_progress: OnProgress) -> tuple[RankFigures, ...]:
    """Runs the job in the directory on `processes` processes; returns their measurements, by rank.

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
    """The likeliest cause among the processes that ended; of several that are equally likely, the first to end."""
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    codes |= {r: 0 for r in range(processes) if r not in codes and read_figures(directory.result(r)) is None}
    said = {rank: read_failure(directory.failure(rank)) for rank in codes}

    def innocence(rank: int) -> tuple[int, float, int]:
        words = said[rank]
        if words is not None:
            level = {"input": 0, "error": 2, "hung": 2, "peer": 4}[words.kind]
        elif codes[rank] == -signal.SIGTERM:  # torchrun ended it after another process
            level = 5
        else:  # it failed without a word; or it was killed, or ended as if all were done
            level = 3 if codes[rank] > 0 else 1
        return level, failures[rank].timestamp if rank in failures else 0.0, rank

    culprit = min(codes, key=innocence)
    words = said[culprit]
    if words is not None and words.kind == "input":
        return invalid_input(words)
    if words is not None:
        why = words.message
    elif codes[culprit] < 0:
        name = signal.Signals(-codes[culprit]).name
        hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        why = f"the process was killed by {name}{hint}"
    else:  # the last line on standard error is, of a traceback, the error itself
        log = next(directory.logs.glob(f"**/{culprit}/stderr.log"), None)
        lines = [] if log is None else [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        line = re.sub(r"^\[rank\d+\]: ?", "", lines[-1]).strip() if lines else ""
        line = line or "it printed nothing"
        why = f"the process ended with exit status {codes[culprit]} before its work was done ({line})"
    return RunFailedError(f"profiling failed on rank {culprit}: {why}; log: {directory.logs}", rank=culprit)
