"""Runs: made with their job, whose state is theirs; report and timeline come in with its end."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, Select, insert, select, update

from planner_service.contract.documents import parse
from planner_service.contract.jobs import Progress, RunResult, RunTask
from planner_service.contract.listing import Page
from planner_service.contract.runs import Run, RunSummary
from planner_service.core.identity import canonical_json
from planner_service.core.report import RunReport
from planner_service.storage.listing import Cut, newest
from planner_service.storage.tables import jobs, plans, runs

_SUMMARY: Select[Any] = (
    select(
        runs.c.sequence,
        runs.c.id,
        runs.c.job_id,
        runs.c.plan_id,
        runs.c.predicted_samples_per_s,
        runs.c.measured_samples_per_s,
        runs.c.created_at,
        plans.c.model_name,
        plans.c.schedule,
        jobs.c.state,
        jobs.c.updated_at,
    )
    .join_from(runs, jobs, jobs.c.id == runs.c.job_id)
    .join(plans, plans.c.id == runs.c.plan_id)
)
_RUN: Select[Any] = select(
    runs.c.id,
    runs.c.job_id,
    runs.c.plan_id,
    runs.c.report,
    runs.c.created_at,
    jobs.c.task,
    jobs.c.state,
    jobs.c.agent,
    jobs.c.progress,
    jobs.c.error,
    jobs.c.updated_at,
).join_from(runs, jobs, jobs.c.id == runs.c.job_id)


def add(connection: Connection, *, run_id: str, job_id: str, plan_id: str, now: datetime) -> None:
    """A run that has not started yet."""
    connection.execute(insert(runs).values(id=run_id, job_id=job_id, plan_id=plan_id, created_at=now))


def finish(connection: Connection, run_id: str, result: RunResult) -> None:
    """What the run measured."""
    throughput = result.report.throughput_samples_per_s
    connection.execute(
        update(runs)
        .where(runs.c.id == run_id)
        .values(
            report=canonical_json(result.report),
            timeline=canonical_json(result.timeline),
            predicted_samples_per_s=throughput.predicted,
            measured_samples_per_s=throughput.measured,
        )
    )


def get(connection: Connection, run_id: str) -> Run | None:
    """The run, with its report once there is one."""
    row = connection.execute(_RUN.where(runs.c.id == run_id)).one_or_none()
    return None if row is None else _run(row)


def timeline(connection: Connection, run_id: str) -> str | None:
    """The measured timeline's document; None for a run that has none (yet)."""
    return connection.execute(select(runs.c.timeline).where(runs.c.id == run_id)).scalar_one_or_none()


def page(connection: Connection, cut: Cut, plan_id: str | None = None) -> Page[RunSummary]:
    """The newest runs, of one plan only where one is named."""
    query = _SUMMARY if plan_id is None else _SUMMARY.where(runs.c.plan_id == plan_id)
    return newest(connection, query, runs, cut, _summary)


def _summary(row: Row[Any]) -> RunSummary:
    values = {name: getattr(row, name) for name in RunSummary.model_fields if name != "model"}
    return RunSummary(model=row.model_name, **values)


def _run(row: Row[Any]) -> Run:
    return Run(
        id=row.id,
        job_id=row.job_id,
        plan_id=row.plan_id,
        task=RunTask.model_validate_json(row.task),
        state=row.state,
        agent=row.agent,
        progress=None if row.progress is None else Progress.model_validate_json(row.progress),
        error=row.error,
        report=None if row.report is None else parse(RunReport, row.report),
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
