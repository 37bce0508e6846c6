"""Store of the runs. A run is created with its job and has the job's state. Report and timeline arrive at the job's
end.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Connection, Row, Select, insert, select, update

from pipeplan.documents.identity import canonical_json
from pipeplan.protocol.jobs import JobState, Progress, RunResult, RunTask
from pipeplan.protocol.listing import Page
from pipeplan.protocol.runs import Run, RunQuery, RunSummary
from pipeplan.simulation.report import Compared, RunReport
from planner_service.platform import listing
from planner_service.platform.stored import columns_of, read_stored
from planner_service.platform.tables import jobs, plans, runs
from planner_service.runs import timelines
from planner_service.runs.timelines import Chunk

_JOINED = runs.join(jobs, jobs.c.id == runs.c.job_id).join(plans, plans.c.id == runs.c.plan_id)
_SUMMARY: Select[Any] = select(
    *(runs.c[name] for name in ("sequence", *RunSummary.model_fields) if name in runs.c),
    *(plans.c.model_name.label("model"), plans.c.schedule, jobs.c.state, jobs.c.updated_at),
).select_from(_JOINED)
_RUN: Select[Any] = select(*((runs if name in runs.c else jobs).c[name] for name in Run.model_fields)).join_from(
    runs, jobs, jobs.c.id == runs.c.job_id
)


_TASK, _PROGRESS, _REPORT = TypeAdapter(RunTask), TypeAdapter(Progress), TypeAdapter(RunReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRun:
    """A run's measurements, in the form in which they are stored."""

    report: str
    throughput: Compared
    timeline_head: str
    chunks: tuple[Chunk, ...]


def add(connection: Connection, *, run_id: str, job_id: str, plan_id: str, now: datetime) -> None:
    connection.execute(insert(runs).values(id=run_id, job_id=job_id, plan_id=plan_id, created_at=now))


def measured(result: RunResult) -> PackedRun:
    """Packs a result outside of any transaction: a large one takes seconds.

    Raises InvalidInputError if the timeline's numbers exceed the stored range.
    """
    return PackedRun(
        report=canonical_json(replace(result.report, losses=(), earlier_losses=())),
        throughput=result.report.throughput_samples_per_s,
        timeline_head=timelines.head(result.timeline),
        chunks=(
            *timelines.chunks_of(result.timeline),
            *timelines.chunks_of_losses(result.report.losses),
            *timelines.chunks_of_losses(result.report.earlier_losses, timelines.EARLIER_LOSSES),
        ),
    )


def finish(connection: Connection, run_id: str, end: PackedRun) -> None:
    """Stores the run's measurements."""
    timelines.store(connection, run_id, end.chunks)
    connection.execute(
        update(runs)
        .where(runs.c.id == run_id)
        .values(
            report=end.report,
            timeline_head=end.timeline_head,
            predicted_samples_per_s=end.throughput.predicted,
            measured_samples_per_s=end.throughput.measured,
        )
    )


def get(connection: Connection, run_id: str) -> Run | None:
    """The run, with its report once there is one. Raises ConflictError for one that this release cannot read."""
    row = connection.execute(_RUN.where(runs.c.id == run_id)).one_or_none()
    if row is None:
        return None
    report = None
    if row.report is not None:
        report = replace(
            read_stored(_REPORT, row.report),
            losses=timelines.read_losses(connection, run_id),
            earlier_losses=timelines.read_losses(connection, run_id, series=timelines.EARLIER_LOSSES),
        )
    progress = None if row.progress is None else read_stored(_PROGRESS, row.progress)
    texts = {"task": read_stored(_TASK, row.task), "progress": progress, "report": report}
    return Run(**columns_of(row, Run) | texts)


def timeline_head(connection: Connection, run_id: str) -> tuple[JobState, str | None] | None:
    """The run's state, and the timeline's header if it has one yet; None if there is no such run."""
    query = select(jobs.c.state, runs.c.timeline_head).join_from(runs, jobs, jobs.c.id == runs.c.job_id)
    row = connection.execute(query.where(runs.c.id == run_id)).one_or_none()
    return None if row is None else (row.state, row.timeline_head)


def page(connection: Connection, query: RunQuery) -> Page[RunSummary]:
    """The runs that the query asks for."""
    filters = [
        listing.equal("plan_id", runs.c.plan_id, query.plan_id),
        listing.equal("model", plans.c.model_name, query.model),
        listing.equal("state", jobs.c.state, query.state),
        *listing.created(runs.c.created_at, query),
    ]
    return listing.page(connection, _LISTING, listing.cut_of(query), filters)


def _summary(row: Row[Any]) -> RunSummary:
    return RunSummary(**columns_of(row, RunSummary))


_LISTING = listing.Listing(
    table=runs, query=_SUMMARY, item=_summary, sorts={"created_at": runs.c.sequence}, rows=_JOINED
)
