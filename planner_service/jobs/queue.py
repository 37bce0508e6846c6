"""Queue: which jobs wait and what they need. It only reads: `store` writes what becomes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Connection, Select, bindparam, func, literal, or_, select

from planner_service.platform.tables import jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job in the queue: what it needs, and its place."""

    needs_id: str
    needs: str
    place: int


def waiting(connection: Connection, kinds: Sequence[str], now: datetime, limit: int) -> list[QueuedJob]:
    """The oldest jobs of these kinds that may be tried now: an index for each kind gives its own."""
    found: list[QueuedJob] = []
    for kind in kinds:
        rows = connection.execute(_WAITING, {"kind": kind, "moment": now, "most": limit})
        found += [QueuedJob(needs_id=row.needs_id, needs=row.needs, place=row.sequence) for row in rows]
    return sorted(found, key=lambda one: one.place)[:limit]


def needs_waiting(connection: Connection, after: str, limit: int) -> list[tuple[str, str]]:
    """So many needs of jobs in the queue, ids and texts, by their ids: a step in an index each, from `after` on."""
    return [(row.needs_id, row.needs) for row in connection.execute(_NEEDS, {"after": after, "most": limit})]


def oldest_of_needs(connection: Connection, kinds: Sequence[str], now: datetime, needs_id: str) -> int | None:
    """The place of the oldest job of these kinds that needs this and may be tried now."""
    found = [connection.execute(_OLDEST, {"kind": kind, "needs": needs_id, "moment": now}) for kind in kinds]
    return min((place for rows in found for place in rows.scalars()), default=None)


def due(now: datetime | BindParameter[datetime]) -> ColumnElement[bool]:
    """Whether a job may be tried now: it does not pause after an attempt."""
    return or_(jobs.c.not_before.is_(None), jobs.c.not_before <= now)


_WAITING = (
    select(jobs.c.sequence, jobs.c.needs_id, jobs.c.needs)
    .where(
        jobs.c.state == "queued",
        jobs.c.kind == bindparam("kind"),
        due(bindparam("moment", type_=jobs.c.not_before.type)),
    )
    .order_by(jobs.c.sequence)
    .limit(bindparam("most"))
)

_OLDEST = (
    select(jobs.c.sequence)
    .where(
        jobs.c.state == "queued",
        jobs.c.needs_id == bindparam("needs"),
        jobs.c.kind == bindparam("kind"),
        due(bindparam("moment", type_=jobs.c.not_before.type)),
    )
    .order_by(jobs.c.sequence)
    .limit(1)
)


def _needs_in_the_queue() -> Select[Any]:
    """Steps from one need in the queue to the next: a loose scan of the index, however many jobs need the same."""
    least = select(func.min(jobs.c.needs_id)).where(jobs.c.state == "queued")
    first = least.where(jobs.c.needs_id > bindparam("after")).scalar_subquery()
    steps = select(first.label("needs_id"), literal(1).label("step")).cte("steps", recursive=True)
    following = least.where(jobs.c.needs_id > steps.c.needs_id).scalar_subquery()
    again = select(following, steps.c.step + 1)
    steps = steps.union_all(again.where(steps.c.needs_id.is_not(None), steps.c.step < bindparam("most")))
    text = select(jobs.c.needs).where(jobs.c.state == "queued", jobs.c.needs_id == steps.c.needs_id).limit(1)
    return select(steps.c.needs_id, text.scalar_subquery().label("needs")).where(steps.c.needs_id.is_not(None))


_NEEDS = _needs_in_the_queue()
