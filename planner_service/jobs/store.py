"""Store of the jobs: the queue, the holders, and the ids of accepted reports.

The services decide on changes of state; this module writes them. `reports` keeps the id of every accepted report, to
recognise repetitions. `jobs.fence` counts the leases of a job (see `leases`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Connection, Row, and_, bindparam, func, insert, select, update

from pipeplan.errors import ConflictError
from pipeplan.protocol.jobs import Job, JobQuery, JobState, Progress, Task, UnreadableTask
from pipeplan.protocol.listing import Page
from planner_service.agents.needs import NO_NEEDS
from planner_service.jobs.queue import due
from planner_service.platform import listing
from planner_service.platform.listing import Cut, Listing, created, cut_of, equal, newest, one_of
from planner_service.platform.stored import columns_of, read_stored, unreadable
from planner_service.platform.tables import jobs, reports

_TASK: TypeAdapter[Task] = TypeAdapter(Task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job, its last holder's token (None for a gang, whose members have their own), and its result's id."""

    job: Job
    token: str | None
    result_id: str | None


@dataclass(frozen=True, slots=True)
class Taking:
    """Who takes a job, under which token, and until when."""

    agent: str
    instance: str | None
    token: str
    now: datetime
    expires_at: datetime


_UNSET = ("token", "agent", "instance", "gang", "lease_expires_at", "not_before", "progress")
_FREE: dict[str, Any] = {"state": "queued", **dict.fromkeys(_UNSET)}
"""The columns of a job without a lease."""

# The statements of every report, made once: building a statement takes longer than executing it.
_BY_ID = select(jobs).where(jobs.c.id == bindparam("asked_id"))
_CLAIM = _BY_ID.with_for_update()
_RAN_OUT = and_(jobs.c.state == "leased", jobs.c.lease_expires_at <= bindparam("moment"))
_ANY_EXPIRED = select(jobs.c.sequence).where(_RAN_OUT).limit(1)
_EXPIRED = select(jobs).where(_RAN_OUT).with_for_update(skip_locked=True)
_EXTEND = (
    update(jobs)
    .where(jobs.c.id == bindparam("asked_id"))
    .values(
        state="leased",
        lease_expires_at=bindparam("until"),
        updated_at=bindparam("moment"),
        progress=func.coalesce(bindparam("told", type_=jobs.c.progress.type), jobs.c.progress),
    )
    .returning(*jobs.c)
)
_FIRST_OF_PLACES = (
    select(jobs.c.sequence)
    .where(
        jobs.c.sequence.in_(bindparam("places", expanding=True)),
        jobs.c.state == "queued",
        due(bindparam("moment", type_=jobs.c.not_before.type)),
    )
    .order_by(jobs.c.sequence)
    .limit(1)
    .with_for_update(skip_locked=True)
)
_TAKE = (
    update(jobs)
    .where(jobs.c.sequence == _FIRST_OF_PLACES.scalar_subquery())
    .values(
        state="leased",
        attempts=jobs.c.attempts + 1,
        fence=jobs.c.fence + 1,
        agent=bindparam("by_agent"),
        instance=bindparam("by_instance"),
        token=bindparam("under"),
        gang=None,
        lease_expires_at=bindparam("until"),
        not_before=None,
        progress=None,
        updated_at=bindparam("moment"),
    )
    .returning(*jobs.c)
)
_HELD_BY = (
    select(jobs.c.id)
    .where(
        jobs.c.state == "leased",
        jobs.c.agent == bindparam("by_agent"),
        jobs.c.instance == bindparam("by_instance"),
        jobs.c.gang.is_(None),
    )
    .order_by(jobs.c.sequence)
    .limit(1)
    .with_for_update()
)


def add(
    connection: Connection,
    *,
    job_id: str,
    task: Task,
    now: datetime,
    needs: tuple[str, str] = NO_NEEDS,
    asked_by: str | None = None,
) -> None:
    """Appends a job to the queue. `needs` are the id and text of its requirements of an agent."""
    connection.execute(
        insert(jobs).values(
            id=job_id,
            kind=task.kind,
            task=task.model_dump_json(),
            state="queued",
            attempts=0,
            needs_id=needs[0],
            needs=needs[1],
            asked_by=asked_by,
            created_at=now,
            updated_at=now,
        )
    )


def name_beside(connection: Connection, job_id: str, beside: Mapping[str, str]) -> None:
    """Writes the ids of objects made with the job, such as `run_id`, into its row."""
    if beside:
        _set(connection, job_id, **beside)


def get(connection: Connection, job_id: str) -> Job | None:
    """The job as everybody sees it."""
    row = connection.execute(_BY_ID, {"asked_id": job_id}).one_or_none()
    return None if row is None else _job(row)


def asked_for(connection: Connection, query: JobQuery) -> Page[Job]:
    """The jobs that the query asks for."""
    filters = [
        one_of("state", jobs.c.state, query.state),
        equal("kind", jobs.c.kind, query.kind),
        equal("agent", jobs.c.agent, query.agent),
        *created(jobs.c.created_at, query),
    ]
    return listing.page(connection, _LISTING, cut_of(query), filters)


def page(connection: Connection, cut: Cut, states: Iterable[JobState] = ()) -> Page[Job]:
    """The newest jobs, in these states only where any are named."""
    wanted = tuple(states)
    query = select(jobs).where(jobs.c.state.in_(wanted)) if wanted else select(jobs)
    return newest(connection, query, jobs, cut, _job)


def claim(connection: Connection, job_id: str) -> Claim | None:
    """The job and its holder; on PostgreSQL the row stays locked until the transaction ends."""
    row = connection.execute(_CLAIM, {"asked_id": job_id}).one_or_none()
    return None if row is None else Claim(job=_job(row), token=row.token, result_id=row.result_id)


def needing(connection: Connection, needs_id: str, limit: int) -> list[Job]:
    """The oldest jobs in the queue that need this."""
    query = select(jobs).where(jobs.c.state == "queued", jobs.c.needs_id == needs_id)
    return [_job(row) for row in connection.execute(query.order_by(jobs.c.sequence).limit(limit).with_for_update())]


def needs_of(connection: Connection, job_id: str) -> str | None:
    return connection.execute(select(jobs.c.needs).where(jobs.c.id == job_id)).scalar_one_or_none()


def take(connection: Connection, places: Sequence[int], taking: Taking) -> Job | None:
    """Leases the first of these jobs that is still in the queue, under its next fence; None if none is.

    SQLite's writers take turns, and its compiler leaves FOR UPDATE out. On PostgreSQL, it skips rows that others are
    just taking.
    """
    if not places:
        return None
    values = {
        "places": list(places),
        "moment": taking.now,
        "by_agent": taking.agent,
        "by_instance": taking.instance,
        "under": taking.token,
        "until": taking.expires_at,
    }
    row = connection.execute(_TAKE, values).one_or_none()
    return None if row is None else _job(row)


def held_by(connection: Connection, agent: str, instance: str) -> str | None:
    """The id of the job that this process alone was given and has not ended. It asks for work, so it does not know of
    the job.
    """
    asked = {"by_agent": agent, "by_instance": instance}
    return connection.execute(_HELD_BY, asked).scalar_one_or_none()


def give_again(connection: Connection, job_id: str, *, token: str, expires_at: datetime, now: datetime) -> None:
    """Leases the job anew to the agent that has it: under a new token and the next fence, as the same attempt."""
    _set(connection, job_id, token=token, fence=jobs.c.fence + 1, lease_expires_at=expires_at, updated_at=now)


def give_to_gang(connection: Connection, job_id: str, agents: Sequence[str]) -> None:
    """Makes these agents the job's gang. Each has a token of its own, the job none."""
    _set(connection, job_id, token=None, instance=None, agent=agents[0], gang=json.dumps(list(agents)))


def expired(connection: Connection, now: datetime) -> list[Job]:
    """The jobs whose lease has expired, except those that others are just changing."""
    return [_job(row) for row in connection.execute(_EXPIRED, {"moment": now})]


def any_expired(connection: Connection, now: datetime) -> bool:
    return connection.execute(_ANY_EXPIRED, {"moment": now}).one_or_none() is not None


def bring_back(connection: Connection, lease_ends: datetime, pause_ends: datetime) -> None:
    """Ends leases and pauses no later than this."""
    held, paused = jobs.c.state == "leased", jobs.c.state == "queued"
    far = update(jobs).where(held, jobs.c.lease_expires_at > lease_ends)
    connection.execute(far.values(lease_expires_at=lease_ends))
    connection.execute(update(jobs).where(paused, jobs.c.not_before > pause_ends).values(not_before=pause_ends))


def requeue(connection: Connection, job_id: str, now: datetime, *, not_before: datetime | None = None) -> None:
    """Puts the job back in its place in the queue. The token stays: the last owner may report until another lease."""
    _set(connection, job_id, state="queued", lease_expires_at=None, not_before=not_before, updated_at=now)


def hand_back(connection: Connection, job_id: str, now: datetime) -> None:
    """Puts the job back without its owner. The attempt does not count."""
    _set(connection, job_id, **_FREE, attempts=jobs.c.attempts - 1, updated_at=now)


def retry(connection: Connection, job_id: str, now: datetime) -> None:
    """Puts back a job that has ended without a result, as if it had never been tried."""
    _set(connection, job_id, **_FREE, attempts=0, error=None, updated_at=now)


def extend(connection: Connection, job_id: str, progress: Progress | None, expires_at: datetime, now: datetime) -> Job:
    """Extends the lease of an owner that is alive, and stores its progress, if any. Returns the job as it is now."""
    told = None if progress is None else progress.model_dump_json()
    values = {"asked_id": job_id, "until": expires_at, "moment": now, "told": told}
    return _job(connection.execute(_EXTEND, values).one())


def go_on(connection: Connection, job_id: str, *, task: Task, beside: Mapping[str, str | None], now: datetime) -> None:
    """Queues the job again with another task, which any worker of its kind may take."""
    needs_id, needs = NO_NEEDS
    _set(connection, job_id, kind=task.kind, task=task.model_dump_json(), needs_id=needs_id, needs=needs, **beside)
    retry(connection, job_id, now)


def succeed(
    connection: Connection, job_id: str, *, result_id: str, now: datetime, beside: Mapping[str, str | None]
) -> None:
    """Ends the job with its result; `beside` are further columns of its row, such as `profile_id`."""
    _set(connection, job_id, state="succeeded", result_id=result_id, **beside, lease_expires_at=None, updated_at=now)


def end(connection: Connection, job_id: str, *, state: JobState, error: str | None, now: datetime) -> None:
    _set(connection, job_id, state=state, error=error, lease_expires_at=None, updated_at=now)


def report_taken(connection: Connection, report_id: str | None) -> str | None:
    """The id of the job for which the report was accepted, else None. The transaction must hold its job."""
    if report_id is None:
        return None
    return connection.execute(select(reports.c.job_id).where(reports.c.id == report_id)).scalar_one_or_none()


def take_report(connection: Connection, report_id: str | None, job_id: str, now: datetime) -> None:
    """Stores a report's id in the transaction of the report's effect. A report without an id is not stored."""
    if report_id is not None:
        connection.execute(insert(reports).values(id=report_id, job_id=job_id, created_at=now))


def _set(connection: Connection, job_id: str, **values: Any) -> None:
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values))


def is_readable(text: str) -> bool:
    """Whether this release can read the task in a text."""
    try:
        read_stored(_TASK, text)
    except ConflictError:
        return False
    return True


def _job(row: Row[Any]) -> Job:
    """The job of a row. Of one that another release wrote, and this one cannot read, only the columns."""
    columns = columns_of(row, Job)
    columns["not_before"] = row.not_before if row.state == "queued" else None
    try:
        task = read_stored(_TASK, row.task)
        progress = None if row.progress is None else Progress.model_validate_json(row.progress)
        answer = {} if row.answer is None else json.loads(row.answer)
        agents = () if row.gang is None else tuple(json.loads(row.gang))
        return Job(**columns | {"task": task, "progress": progress}, agents=agents, **answer)
    except ConflictError as error:
        reason = str(error)
    except (ValueError, TypeError) as error:
        reason = str(unreadable(ValueError(error) if isinstance(error, TypeError) else error))
    return Job(**columns | {"task": UnreadableTask(stored_kind=row.kind, reason=reason), "progress": None})


_LISTING = Listing(table=jobs, query=select(jobs), item=_job, sorts={"created_at": jobs.c.sequence})
