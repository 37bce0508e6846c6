"""Work: one job from its lease to its end, in a process of its own."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeplan.documents.files import dump, parse, plan_document, read_text
from pipeplan.errors import InvalidInputError, RunFailedError, require
from pipeplan.protocol.estimates import EstimateResult
from pipeplan.protocol.jobs import (
    AgentResult,
    Lease,
    LinksResult,
    PartResult,
    PlanTask,
    ProfileResult,
    RunResult,
    RunTask,
    UnreadableTask,
)
from worker_agent.agent.child import CHECKPOINT_S, LOST_PEER, JobProcess, Mark, start
from worker_agent.agent.client import AgentClient, Heart
from worker_agent.agent.limits import JobLimits, folder_bytes, without_secrets
from worker_agent.agent.settings import AgentSettings, require_allowed, require_allowed_schedule
from worker_agent.agent.task import write_task
from worker_agent.engine.processes import Place

_LOOK_S = 0.1
_DISK_S = 5.0

Urgency = Literal["none", "drain", "now"]
"""Whether the agent continues, ends once the job has ended or its time is over, or ends at once."""


class HandedBackError(Exception):
    """The agent ends, and leaves the job to others."""


class StoppedError(Exception):
    """The job was stopped because of others; another attempt may succeed."""


class CancelledError(Exception):
    """The job is no longer wanted, or no longer this agent's: nothing is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedWork:
    """The context of a job: the settings, the service, and whether the agent is about to end."""

    settings: AgentSettings
    client: AgentClient
    urgency: Callable[[], Urgency]

    def perform(self, lease: Lease) -> AgentResult:
        """The job's result. Raises the reason if there is none. In both cases no process of the job is left."""
        task = lease.job.task
        if isinstance(task, PlanTask | UnreadableTask):
            raise InvalidInputError("kind", "must be a kind of job that agents do", task.kind)
        require_allowed(task, self.settings.allow, self.settings.models_dir)
        plan = None
        if isinstance(task, RunTask):
            planned = self.client.plan(task.plan_id)
            require_allowed_schedule(planned.schedule, self.settings.allow)
            plan = dump(plan_document(planned))
        # A gang's attempt has a folder of its own, because the node's place in it may be another one.
        attempt = f"{lease.job.id}-{lease.job.fence}"
        folder = self.settings.work_dir / (lease.job.id if lease.gang is None else attempt)
        limits = JobLimits(
            memory_bytes=self.settings.max_memory_bytes,
            open_files=self.settings.max_open_files,
            processes=self.settings.max_processes,
            nice=self.settings.nice,
        )
        gang, place = lease.gang, None
        if gang is not None:
            place = Place(
                node_rank=gang.node_rank, nodes=gang.nodes, address=gang.address, port=gang.port, meeting=attempt
            )
        write_task(folder, task, plan, limits=limits, place=place, out=self._out(lease, folder))

        mark = Mark(work_dir=self.settings.work_dir, agent=os.getpid(), job=lease.job.id, fence=lease.job.fence)
        environment = without_secrets(os.environ, token=self.settings.token, keep=self.settings.keep_environment)
        child = start(folder, mark, environment)
        heart = Heart(self.client, lease, lambda: child.progress)
        heart.start()
        try:
            self._follow(lease, child, heart, folder)
        finally:
            heart.stop()
            child.stop()
        if child.process.returncode == LOST_PEER:
            raise StoppedError(child.reason())
        if child.process.returncode != 0:
            raise RunFailedError(child.reason())
        return _result(lease, folder)

    def _out(self, lease: Lease, folder: Path) -> Path:
        """The folder of a run's checkpoints: in the job's folder or, on several nodes, in their shared folder."""
        if lease.gang is None or not isinstance(lease.job.task, RunTask):
            return folder / "out"
        shared = self.settings.shared_dir
        rule = "must be set for a run over several nodes, to a folder that all of them see (--shared-dir)"
        require(shared is not None, "shared_dir", rule, None)
        return (shared or folder) / lease.job.id / "out"

    def _follow(self, lease: Lease, child: JobProcess, heart: Heart, folder: Path) -> None:
        """Returns when the process has ended. Raises the reason if it must be stopped before."""
        started_s = looked_s = time.monotonic()
        ends_s: float | None = None  # where the agent drains
        # A job with shared files must stop before the service may give it to others, who use the same files.
        shares = lease.gang is not None or self.settings.shared_dir is not None
        asked, why = False, f"the agent drains, and the job did not end within {self.settings.drain_s:g} s"
        early_s = max(lease.expires_in_s / 10, 2 * _LOOK_S)
        while not child.ended:
            time.sleep(_LOOK_S)
            now_s = time.monotonic()
            _require_wanted(heart)
            if shares and heart.cut_off_at(now_s) and now_s >= heart.ends_s - early_s:
                child.kill()
                # A gang's other parts cannot continue without this one: when its end is reported, the service
                # restarts all of them. A job for one node returns to this agent, unless another one has it.
                raise (CancelledError if lease.gang is None else StoppedError)(
                    "the service was out of reach until the lease expired: stopped, as another agent may have the job"
                )

            urgency = self.urgency()
            if urgency == "now":
                raise HandedBackError("the agent ends at once")
            if urgency == "drain" and ends_s is None:
                ends_s = now_s + self.settings.drain_s
            if ends_s is not None and now_s >= ends_s and not asked:
                asked = True
                child.ask_to_end()
            if ends_s is not None and now_s >= ends_s + CHECKPOINT_S:
                raise HandedBackError(f"{why}, nor {CHECKPOINT_S:g} s after it was asked to")

            looks = now_s - looked_s > _DISK_S
            looked_s = now_s if looks else looked_s
            self._require_within_limits(child, now_s - started_s, folder if looks else None)
        if self.urgency() == "now":  # stopping a node's service also stops the job's process: not a failure
            raise HandedBackError("the agent ends at once")
        if asked and child.process.returncode != 0:
            raise HandedBackError(why)
        child.finish_reading()
        heart.finish()
        _require_wanted(heart)

    def _require_within_limits(self, child: JobProcess, elapsed_s: float, folder: Path | None) -> None:
        """Raises RunFailedError if the job exceeds a limit of the settings; the disk's only if a folder is given."""
        settings = self.settings
        if settings.max_job_s is not None and elapsed_s > settings.max_job_s:
            raise RunFailedError(f"the job took longer than this agent allows, {settings.max_job_s:g} s (max_job_s)")
        if child.printed > settings.max_output_bytes:
            most = settings.max_output_bytes
            raise RunFailedError(f"the job printed more than this agent allows, {most} bytes (max_output_bytes)")
        disk_bytes = settings.max_disk_bytes
        if disk_bytes is not None and folder is not None and folder_bytes(folder) > disk_bytes:
            allowed = f"{disk_bytes} bytes (max_disk_bytes)"
            raise RunFailedError(f"the job's folder took more than this agent allows, {allowed}")


def _require_wanted(heart: Heart) -> None:
    if heart.lost is not None:
        raise heart.lost
    if heart.cancelled:
        raise CancelledError("cancelled")
    if heart.stop_reason is not None:
        raise StoppedError(f"stopped: {heart.stop_reason}")


def _result(lease: Lease, folder: Path) -> AgentResult:
    text = read_text(folder / "result.json")
    if lease.gang is not None and lease.gang.node_rank > 0:
        return parse(PartResult, text)
    kinds: dict[str, type[RunResult | LinksResult | ProfileResult | EstimateResult]] = {
        "estimate": EstimateResult,
        "run": RunResult,
        "links": LinksResult,
        "profile": ProfileResult,
    }
    return parse(kinds[lease.job.task.kind], text)
