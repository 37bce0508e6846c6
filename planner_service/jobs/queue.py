"""Queue: the waiting jobs and their needs. This module only reads; `store` writes changes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    CompoundSelect,
    Connection,
    Select,
    bindparam,
    literal,
    or_,
    select,
    true,
    union_all,
)

from planner_service.platform.tables import jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job in the queue: its needs, and its place."""

    needs_id: str
    needs: str
    place: int


def waiting(connection: Connection, kinds: Iterable[str], now: datetime, limit: int) -> list[QueuedJob]:
    """The oldest jobs of these kinds that may be tried now. An index finds those of each kind."""
    return _of_kinds(connection, _waiting, kinds, {"moment": now, "most": limit})


def needs_waiting(connection: Connection, after: str, limit: int) -> list[tuple[str, str]]:
    """At most `limit` needs of queued jobs, ids and texts, by their ids from `after` on: one index search each."""
    rows = connection.execute(_NEEDS[connection.dialect.name], {"after": after, "most": limit})
    return [(row.needs_id, row.needs) for row in rows]


def of_needs(
    connection: Connection, kinds: Iterable[str], now: datetime, needs_id: str, after: int, limit: int
) -> list[QueuedJob]:
    """The oldest jobs of these kinds, beyond a place, that need this and may be tried now."""
    values = {"moment": now, "needs": needs_id, "after": after, "most": limit}
    return _of_kinds(connection, _needing, kinds, values)


def tasks(connection: Connection, places: Sequence[int]) -> dict[int, str]:
    """The texts of these jobs' tasks, by place."""
    rows = connection.execute(_TASKS, {"places": list(places)})
    return {row.sequence: row.task for row in rows}


def due(now: datetime | BindParameter[datetime]) -> ColumnElement[bool]:
    """Whether a job may be tried now: it does not pause after an attempt."""
    return or_(jobs.c.not_before.is_(None), jobs.c.not_before <= now)


def _of_kinds(
    connection: Connection, made: Callable[[int], CompoundSelect[Any]], kinds: Iterable[str], values: Mapping[str, Any]
) -> list[QueuedJob]:
    """The statement's jobs of these kinds, oldest first, up to `values["most"]`; none without kinds."""
    each = {f"kind_{index}": kind for index, kind in enumerate(dict.fromkeys(kinds))}
    rows = connection.execute(made(len(each)), {**values, **each}).all() if each else []
    found = [QueuedJob(needs_id=row.needs_id, needs=row.needs, place=row.sequence) for row in rows]
    return sorted(found, key=lambda one: one.place)[: values["most"]]


_QUEUED = select(jobs.c.sequence, jobs.c.needs_id, jobs.c.needs)
_TASKS = select(jobs.c.sequence, jobs.c.task).where(jobs.c.sequence.in_(bindparam("places", expanding=True)))


@cache
def _waiting(kinds: int) -> CompoundSelect[Any]:
    return _oldest_first(_QUEUED, kinds)


@cache
def _needing(kinds: int) -> CompoundSelect[Any]:
    beyond = jobs.c.sequence > bindparam("after")
    return _oldest_first(_QUEUED.where(jobs.c.needs_id == bindparam("needs"), beyond), kinds)


def _oldest_first(query: Select[Any], kinds: int) -> CompoundSelect[Any]:
    """The statement of the oldest rows of the query for each kind: the first ones in an index. Nothing is sorted."""
    moment = bindparam("moment", type_=jobs.c.not_before.type)
    found = [
        query.where(jobs.c.state == "queued", jobs.c.kind == bindparam(f"kind_{index}"), due(moment))
        .order_by(jobs.c.sequence)
        .limit(bindparam("most"))
        .subquery()
        for index in range(kinds)
    ]
    return union_all(*map(select, found))


def _needs_in_the_queue() -> Select[Any]:
    """Steps from one need in the queue to the next: a loose scan of the index, however many jobs need the same."""
    queued = select(jobs.c.sequence).where(jobs.c.state == "queued").order_by(jobs.c.needs_id).limit(1)
    first = queued.where(jobs.c.needs_id > bindparam("after")).scalar_subquery()
    begin = select(jobs.c.needs_id, jobs.c.needs, literal(1).label("step")).where(jobs.c.sequence == first)
    steps = begin.cte("steps", recursive=True)
    found = jobs.alias("found")
    following = queued.where(jobs.c.needs_id > steps.c.needs_id).correlate(steps).scalar_subquery()
    step = (
        select(found.c.needs_id, found.c.needs, steps.c.step + 1)
        .join_from(steps, found, found.c.sequence == following)
        .where(steps.c.step < bindparam("most"))
    )
    steps = steps.union_all(step)
    return select(steps.c.needs_id, steps.c.needs)


def _needs_in_the_queue_by_lateral() -> Select[Any]:
    """The same in one search of the index a step, not two: for PostgreSQL, as SQLite has no LATERAL."""
    queued = select(jobs.c.needs_id, jobs.c.needs).where(jobs.c.state == "queued").order_by(jobs.c.needs_id).limit(1)
    first = queued.where(jobs.c.needs_id > bindparam("after")).subquery("first")
    steps = select(first.c.needs_id, first.c.needs, literal(1).label("step")).cte("steps", recursive=True)
    following = queued.where(jobs.c.needs_id > steps.c.needs_id).lateral("following")
    step = (
        select(following.c.needs_id, following.c.needs, steps.c.step + 1)
        .join_from(steps, following, true())
        .where(steps.c.step < bindparam("most"))
    )
    steps = steps.union_all(step)
    return select(steps.c.needs_id, steps.c.needs)


_NEEDS = {"sqlite": _needs_in_the_queue(), "postgresql": _needs_in_the_queue_by_lateral()}
