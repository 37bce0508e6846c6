"""Runs: executions of a plan, their events, and the files that they leave.

A run's state is that of its job. Events say what happened to a job or a run, in order, numbered from 1. A run's folder
holds files for other programs: the plan, its measured timeline, and the report.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeplan.calibration.samples import MeasuredRun
from pipeplan.documents.files import parse, read, read_text
from pipeplan.documents.names import STRICT
from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError, require
from pipeplan.programs.timeline_columns import TimelineColumns
from pipeplan.programs.timeline_document import TimelineDocument
from pipeplan.protocol.jobs import JobState, Progress, RunTask
from pipeplan.protocol.listing import ListQuery, Name, WireModel
from pipeplan.simulation.report import RankReport, RunReport

SubjectKind = Literal["job", "run"]

ENDINGS = frozenset({"succeeded", "failed", "cancelled", "dead"})
"""The kinds of events after which no other follows."""

PLAN, TIMELINE, REPORT = "plan.json", "timeline.json", "run.json"
"""The files in a run's folder."""


class Event(WireModel):
    """One event. `kind` is the state that the subject came to, or "progress"; `data` holds what changed with it."""

    number: int = Field(description="by subject, from 1 on without gaps: the id of the server-sent event")
    kind: str
    data: dict[str, Any]
    created_at: datetime

    @property
    def ends(self) -> bool:
        return self.kind in ENDINGS


def events_in(lines: Iterable[str]) -> Iterator[Event]:
    """The events in the lines of a stream of server-sent events; one that is cut off is left out."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield Event.model_validate_json("\n".join(data))
            data = []


class RunSummary(WireModel):
    """A run as lists show it; it has throughputs once it has succeeded."""

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


class Run(WireModel):
    """A run: its request, its progress, and its measurements once it has succeeded."""

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


class Losses(WireModel):
    """A run's losses, one for each step, those of earlier attempts too; the first is that of `first_step`."""

    run_id: str
    first_step: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayColumns:
    """A run's last batches, each timeline from 0 on. `predicted` is None if the plan is too large to be played."""

    predicted: TimelineColumns | None
    measured: TimelineColumns

    __pydantic_config__: ClassVar = STRICT


def has_steps(folder: Path) -> bool:
    """Whether the report in a run's folder is of a run that has done steps, or cannot be read."""
    found = _state(folder / REPORT)
    return (folder / REPORT).exists() and (found.get("state", "succeeded") == "succeeded" or found.get("step") != 0)


def _state(report: Path) -> dict[str, Any]:
    """A report as it is; empty for what is none. Earlier releases wrote one only of a run that has succeeded."""
    try:
        found = json.loads(read_text(report))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_run(folder: Path) -> MeasuredRun:
    """The run in a folder that `pipeplan-agent run` wrote. Raises InvalidInputError, which names the file."""
    found = _state(folder / REPORT) if (folder / REPORT).is_file() else {}
    rule = f"must be the folder of a run that has succeeded, and this one is {found.get('state')}: {found.get('error')}"
    require(found.get("state", "succeeded") == "succeeded", "run", rule, str(folder))
    for name in (PLAN, TIMELINE, REPORT):
        rule = f"must be the folder of a run, with {PLAN}, {TIMELINE} and {REPORT}: there is no {name}"
        require((folder / name).is_file(), "run", rule, str(folder))
    try:
        plan, timeline = read(Plan, folder / PLAN), read(TimelineDocument, folder / TIMELINE).timeline()
        report = folder / REPORT
        try:
            ranks = [parse(RankReport, rank) for rank in found["ranks"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(str(report), "must be the report of a run", str(error)) from error
        ranks.sort(key=lambda rank: rank.rank)
        of_devices = tuple(rank.device_memory for rank in ranks if rank.device_memory is not None)
        return MeasuredRun(
            plan=plan,
            timeline=timeline,
            peak_resident_bytes=tuple(rank.peak_resident_bytes for rank in ranks),
            device_memory=of_devices if len(of_devices) == len(ranks) else (),
        )
    except InvalidInputError as error:
        if str(folder) in f"{error.field} {error.value}":
            raise
        raise InvalidInputError(f"{folder}: {error.field}", error.rule, error.value) from error
