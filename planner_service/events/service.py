"""Events: changes of jobs and runs, stored in the transaction of each change: a follower misses nothing."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import Connection

from pipeplan.protocol.jobs import Job
from pipeplan.protocol.runs import ENDINGS, Event
from planner_service.events import store as storage
from planner_service.events.store import Subject
from planner_service.platform.context import Context, found

PAGE = 200
"""The upper bound on events of one read."""

TOLD = frozenset(
    {"state", "attempts", "agent", "progress", "error", "profile_id", "cluster_id", "run_id", "plan_id", "infeasible"}
)
"""The fields of its job that an event holds."""


def record_job(connection: Connection, job: Job, now: datetime, kind: str | None = None) -> None:
    """Appends the job's present fields to its own events and to its run's: in the transaction that makes the change,
    after it has written the job's row. `kind` is its state, or "progress".
    """
    data = job.model_dump(mode="json", include=set(TOLD), exclude_none=True)
    storage.add(connection, ("job", job.id), kind or job.state, data, now)
    if job.run_id is not None:
        storage.add(connection, ("run", job.run_id), kind or job.state, data, now)


def after(context: Context, subject: Subject, number: int) -> list[Event]:
    """The next page of events of a job or a run."""
    with context.database.read() as connection:
        return storage.after(connection, subject, number, limit=PAGE)


def newest(context: Context, subjects: Collection[Subject]) -> dict[Subject, int]:
    """The number of each subject's newest event."""
    with context.database.read() as connection:
        return storage.newest(connection, subjects)


def has_ended(context: Context, subject: Subject) -> bool:
    """Whether the subject has ended. Raises NotFoundError if there is no such job or run."""
    kind, identity = subject
    with context.database.read() as connection:
        return found(kind, identity, storage.state(connection, subject)) in ENDINGS
