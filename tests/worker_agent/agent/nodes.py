"""Nodes for tests: `pipeplan-agent start` as a process of its own, and what of a job's processes is to be seen."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pipeplan.client.client import Client
from pipeplan.planners.problem import Options
from pipeplan.protocol.jobs import RunTask
from pipeplan.protocol.plans import PlanRequest
from planner_service.overview.openapi import CLUSTER, PROFILE
from tests.planner_service.servers import environment
from tests.processes import processes_naming

MLP = "worker_agent.models.presets:mlp?width=8&depth=4"
SLEEP = "worker_agent.models.presets:sleep?width=8&depth=4&forward_s=0.004&backward_s=0.008"
DATA = "worker_agent.models.presets:regression?width=8"
ENDLESS = 1000
"""Steps of a few minutes."""

_AGENT = (sys.executable, "-c", "from worker_agent.cli import main; main()", "start")


@contextmanager
def working(
    url: str, work_dir: Path, *options: str, name: str = "node-1", variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """An agent's process and the file of what it says; it is ended with the block."""
    log = work_dir.with_suffix(f".{name}.log")
    command = [*_AGENT, "--url", url, "--name", name, "--work-dir", str(work_dir), "--drain-s", "0", *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, env=environment(PIPEPLAN_AGENT_POLL_S="0.1", **variables))
    try:
        yield process, log
    finally:
        process.terminate()
        process.wait()


def store_plan(service: Client, *, stages: int = 2) -> str:
    """The id of a plan of four blocks on so many devices, a stage on each, for any model that has as many blocks."""
    (level,) = CLUSTER.levels
    cluster = replace(CLUSTER, levels=(replace(level, size=stages),))
    request = PlanRequest(
        profile_id=service.create_profile(PROFILE).id,
        cluster_id=service.create_cluster(cluster).id,
        planner="pipedream-2bw",
        batch_size=8,
        options=Options(stages=stages, schedule="1f1b" if stages > 1 else "data-parallel"),
    )
    return str(service.create_plan(request).plan_id)


def run_task(plan_id: str, *, model: str = MLP, steps: int = 4, checkpoint_every: int = 0) -> RunTask:
    """A task that executes the plan."""
    return RunTask(plan_id=plan_id, model=model, data=DATA, steps=steps, checkpoint_every=checkpoint_every)


def task_process(folder: Path) -> int:
    """The process that does the job in a folder; its ranks are others."""
    task = b"worker_agent.agent.task"
    return next(pid for pid in processes_naming(folder) if task in Path(f"/proc/{pid}/cmdline").read_bytes())
