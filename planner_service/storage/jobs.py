"""Jobs: the queue, and who holds what. Changes of state are the services' to decide; here they are written down."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, Connection, Row, insert, select, update

from planner_service.contract.jobs import Job, JobState, Progress, Task
from planner_service.contract.listing import Page
from planner_service.storage.listing import Cut, newest
from planner_service.storage.tables import jobs

_TASK: TypeAdapter[Task] = TypeAdapter(Task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job, the token of whoever held it last, and what it ended with."""

    job: Job
    token: str | None
    result_id: str | None


def add(
    connection: Connection, *, job_id: str, task: Task, run_id: str | None, idempotency_key: str | None, now: datetime
) -> None:
    """Appends a job to the queue."""
    connection.execute(
        insert(jobs).values(
            id=job_id,
            kind=task.kind,
            task=task.model_dump_json(),
            state="queued",
            attempts=0,
            run_id=run_id,
            idempotency_key=idempotency_key,
            created_at=now,
            updated_at=now,
        )
    )


def get(connection: Connection, job_id: str) -> Job | None:
    """The job as everybody sees it."""
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
    return None if row is None else _job(row)


def by_idempotency_key(connection: Connection, key: str) -> Job | None:
    """The job that was enqueued under this key."""
    row = connection.execute(select(jobs).where(jobs.c.idempotency_key == key)).one_or_none()
    return None if row is None else _job(row)


def page(connection: Connection, cut: Cut, states: Iterable[JobState] = ()) -> Page[Job]:
    """The newest jobs, in these states only where any are named."""
    wanted = tuple(states)
    query = select(jobs).where(jobs.c.state.in_(wanted)) if wanted else select(jobs)
    return newest(connection, query, jobs, cut, _job)


def claim(connection: Connection, job_id: str) -> Claim | None:
    """The job and who holds it; on PostgreSQL nobody else changes it until the transaction ends."""
    row = connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one_or_none()
    return None if row is None else Claim(job=_job(row), token=row.token, result_id=row.result_id)


def take_oldest(
    connection: Connection, *, kinds: Sequence[str], agent: str, token: str, now: datetime, expires_at: datetime
) -> Job | None:
    """Leases the oldest queued job to the agent; None where there is none.

    SQLite's writers take turns and its compiler leaves FOR UPDATE out; on PostgreSQL rows that others are just
    taking are skipped.
    """
    oldest = (
        select(jobs.c.sequence)
        .where(jobs.c.state == "queued", jobs.c.kind.in_(kinds))
        .order_by(jobs.c.sequence)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    taken = (
        update(jobs)
        .where(jobs.c.sequence == oldest)
        .values(
            state="leased",
            attempts=jobs.c.attempts + 1,
            agent=agent,
            token=token,
            lease_expires_at=expires_at,
            progress=None,
            updated_at=now,
        )
        .returning(*jobs.c)
    )
    row = connection.execute(taken).one_or_none()
    return None if row is None else _job(row)


def expired(connection: Connection, now: datetime) -> list[Job]:
    """The jobs whose lease has run out."""
    query = select(jobs).where(*_lapsed(now)).with_for_update()
    return [_job(row) for row in connection.execute(query)]


def any_expired(connection: Connection, now: datetime) -> bool:
    """Whether any lease has run out."""
    query = select(jobs.c.sequence).where(*_lapsed(now)).limit(1)
    return connection.execute(query).one_or_none() is not None


def requeue(connection: Connection, job_id: str, now: datetime) -> None:
    """Puts the job back in its place in the queue. The token stays: until somebody takes the job, it is its owner's."""
    _set(connection, job_id, state="queued", lease_expires_at=None, updated_at=now)


def extend(connection: Connection, job_id: str, progress: Progress | None, expires_at: datetime, now: datetime) -> None:
    """The owner is alive: the lease goes on, and its progress is kept where it tells of any."""
    told = {} if progress is None else {"progress": progress.model_dump_json()}
    _set(connection, job_id, state="leased", lease_expires_at=expires_at, updated_at=now, **told)


def succeed(
    connection: Connection,
    job_id: str,
    *,
    result_id: str,
    now: datetime,
    profile_id: str | None = None,
    cluster_id: str | None = None,
) -> None:
    """Ends the job with its result."""
    _set(
        connection,
        job_id,
        state="succeeded",
        result_id=result_id,
        profile_id=profile_id,
        cluster_id=cluster_id,
        lease_expires_at=None,
        updated_at=now,
    )


def end(connection: Connection, job_id: str, *, state: JobState, error: str | None, now: datetime) -> None:
    """Ends the job without a result."""
    _set(connection, job_id, state=state, error=error, lease_expires_at=None, updated_at=now)


def _lapsed(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return (jobs.c.state == "leased", jobs.c.lease_expires_at <= now)


def _set(connection: Connection, job_id: str, **values: Any) -> None:
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values))


def _job(row: Row[Any]) -> Job:
    return Job(
        id=row.id,
        task=_TASK.validate_json(row.task),
        state=row.state,
        attempts=row.attempts,
        agent=row.agent,
        lease_expires_at=row.lease_expires_at,
        progress=None if row.progress is None else Progress.model_validate_json(row.progress),
        error=row.error,
        profile_id=row.profile_id,
        cluster_id=row.cluster_id,
        run_id=row.run_id,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
