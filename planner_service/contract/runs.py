"""Runs: executions of a plan. A run's state is that of its job."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from pipeplan.simulation.report import RunReport
from planner_service.contract.jobs import JobState, Progress, RunTask
from planner_service.contract.listing import ListQuery, Name
from planner_service.contract.wire import Wire


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


class RunQuery(ListQuery):
    """Which runs, and in which order: newest first, or with created_at oldest first."""

    sort: Literal["created_at", "-created_at"] | None = None
    plan_id: Name | None = Field(default=None, description="runs of this plan")
    model: Name | None = Field(default=None, description="runs of plans for the model of this name")
    state: JobState | None = None


class Losses(Wire):
    """A run's losses, a step each; the first of them is that of `first_step`."""

    run_id: str
    first_step: int
    losses: tuple[float, ...]
