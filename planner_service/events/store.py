"""Events: appended in the transaction of the change that they report, and read from a given number on."""

from collections.abc import Collection, Mapping
from datetime import datetime
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import BindParameter, Column, Connection, Insert, bindparam, func, insert, select

from pipeplan.documents.identity import canonical_json
from pipeplan.errors import ConflictError
from pipeplan.protocol.runs import Event, SubjectKind
from planner_service.platform.stored import read_stored
from planner_service.platform.tables import events, jobs, runs

_DATA: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])

Subject = tuple[SubjectKind, str]
"""A job or a run, by its id."""


def add(connection: Connection, subject: Subject, kind: str, data: Mapping[str, object], now: datetime) -> None:
    """Appends an event. The transaction must have written the subject's job before: its lock makes numbers unique."""
    values = {"subject": subject[1], "of_kind": kind, "told": canonical_json(data), "moment": now}
    connection.execute(_append(subject[0]), values)


def after(connection: Connection, subject: Subject, number: int, *, limit: int) -> list[Event]:
    """The events that follow a number, the oldest first."""
    query = (
        select(events.c.number, events.c.kind, events.c.data, events.c.created_at)
        .where(_column(subject[0]) == subject[1], events.c.number > number)
        .order_by(events.c.number)
        .limit(limit)
    )
    found = []
    for row in connection.execute(query):
        try:
            data = read_stored(_DATA, row.data)
        except ConflictError as error:
            data = {"unreadable": str(error)}
        found.append(Event(number=row.number, kind=row.kind, data=data, created_at=row.created_at))
    return found


def newest(connection: Connection, subjects: Collection[Subject]) -> dict[Subject, int]:
    """The newest number of each subject that has any."""
    found: dict[Subject, int] = {}
    kinds: tuple[SubjectKind, ...] = ("job", "run")
    for kind in kinds:
        ids = [identity for of, identity in subjects if of == kind]
        if ids:
            column = _column(kind)
            query = select(column, func.max(events.c.number)).where(column.in_(ids)).group_by(column)
            found |= {(kind, identity): number for identity, number in connection.execute(query)}
    return found


def state(connection: Connection, subject: Subject) -> str | None:
    """The state of the subject's job; None where there is no such subject."""
    kind, identity = subject
    query = select(jobs.c.state)
    if kind == "job":
        query = query.where(jobs.c.id == identity)
    else:
        query = query.join_from(jobs, runs, runs.c.job_id == jobs.c.id).where(runs.c.id == identity)
    return connection.execute(query).scalar_one_or_none()


@cache
def _append(kind: SubjectKind) -> Insert:
    """The statement that appends, made once for each kind: to build it takes longer than to execute it."""
    column = _column(kind)
    subject: BindParameter[str] = bindparam("subject")
    last = select(func.coalesce(func.max(events.c.number), 0)).where(column == subject).scalar_subquery()
    told = {"kind": "of_kind", "data": "told", "created_at": "moment"}
    bound: dict[str, Any] = {name: bindparam(value) for name, value in told.items()}
    return insert(events).values(**{column.name: subject}, number=last + 1, **bound)


def _column(kind: SubjectKind) -> Column[str]:
    column: Column[str] = events.c.job_id if kind == "job" else events.c.run_id
    return column
