"""Run jobs: the kind of job that executes a plan. A run is made with its job; the job's end stores the measurements."""

import json
import secrets
from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Connection

from pipeplan.documents.engines import OUR_RUNTIME, require_executable
from pipeplan.errors import InvalidInputError, require
from pipeplan.protocol.jobs import Job, RunResult, RunTask
from pipeplan.protocol.training import require_planned_autocast
from planner_service.agents.needs import Needs, factories_of
from planner_service.jobs.kinds import JobKind
from planner_service.plans import store as plans
from planner_service.platform.context import Context, found
from planner_service.runs import store as storage
from planner_service.runs.store import PackedRun


def pack(result: RunResult) -> PackedRun:
    """Packs a result. Raises InvalidInputError if the timeline holds a text that is not an instruction."""
    result.timeline.timeline()  # a text that cannot be read back could not be drawn
    return storage.measured(result)


def _needs(connection: Connection, task: RunTask) -> Needs:
    """Raises InvalidInputError for a plan that is not stored, is for another engine or another autocast, or does not
    fill the nodes.
    """
    plan, asked = plans.summary(connection, task.plan_id), plans.request(connection, task.plan_id)
    if plan is None or asked is None:
        raise InvalidInputError("plan_id", "must be the id of a stored plan", task.plan_id)
    require_executable(asked.options.engine or OUR_RUNTIME)
    if task.autocast is not None:
        content = plans.content(connection, task.plan_id)
        planned = None if content is None else json.loads(content).get("autocast")
        require_planned_autocast(task.autocast, planned)
    require(plan.workers % task.nodes == 0, "nodes", f"must divide the plan's {plan.workers} workers", task.nodes)
    return Needs(
        nodes=task.nodes,
        processes=plan.workers // task.nodes,
        agents=task.agents,
        factories=factories_of(task),
        shared_folder=task.nodes > 1,
    )


def _begin(connection: Connection, job_id: str, task: RunTask, now: datetime) -> Mapping[str, str]:
    run_id = secrets.token_hex(16)
    storage.add(connection, run_id=run_id, job_id=job_id, plan_id=task.plan_id, now=now)
    return {"run_id": run_id}


def _store(context: Context, connection: Connection, job: Job, packed: PackedRun) -> Mapping[str, str]:
    storage.finish(connection, found("run of job", job.id, job.run_id), packed)
    context.metrics.observe_prediction(predicted=packed.throughput.predicted, measured=packed.throughput.measured)
    return {}


RUN = JobKind(name="run", needs=_needs, begin=_begin, pack=pack, store=_store)
