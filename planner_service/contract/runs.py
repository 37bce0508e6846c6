"""Runs: executions of a plan. A run's state is that of its job."""

from datetime import datetime

from planner_service.contract.jobs import JobState, Progress, RunTask
from planner_service.contract.wire import Wire
from planner_service.core.report import RunReport


class RunSummary(Wire):
    """A run as lists show it; throughputs are there once it has succeeded."""

    id: str
    job_id: str
    plan_id: str
    model: str
    schedule: str
    state: JobState
    predicted_samples_per_s: float | None
    measured_samples_per_s: float | None
    created_at: datetime
    updated_at: datetime


class Run(Wire):
    """A run: what was asked for, how far it is, and what it measured once it has succeeded."""

    id: str
    job_id: str
    plan_id: str
    task: RunTask
    state: JobState
    agent: str | None
    progress: Progress | None
    error: str | None
    report: RunReport | None
    created_at: datetime
    updated_at: datetime
