"""Measure: a model's profile, and this node as a cluster, by running the model on the node's devices."""

import shutil
import tempfile
from pathlib import Path

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError
from worker_agent.models.spec import parse_spec
from worker_agent.profiler.job import ProfileDirectory, ProfileJob, write_job
from worker_agent.profiler.launch import launch
from worker_agent.profiler.progress import OnProgress
from worker_agent.profiler.results import cluster_of, profile_of


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
