"""Store of retention: which rows of each noun a rule covers, which of them are old, and which are unneeded.

Retention goes through a table in the order of its rows, a slice at a time. `look` only reads: it finds the rows of a
slice that may be removed. `remove` writes: it removes those of them that may still be removed. A row stays if something
has referred to it in the meantime.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Column, ColumnElement, Connection, Table, and_, delete, exists, func, or_, select

from planner_service.platform.tables import (
    UtcTime,
    agents,
    alias_moves,
    aliases,
    audit,
    clusters,
    events,
    jobs,
    plans,
    profiles,
    runs,
    sessions,
    tokens,
)

SLICE = 2000
"""How many rows one look goes through."""

ENDED = ("succeeded", "failed", "cancelled", "dead")
ABANDONED = ("failed", "cancelled", "dead")

_ID = re.compile(r'"([0-9a-f]{32})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRows:
    """The bounds of old rows: a time and a place. `now` decides which tokens have expired."""

    now: datetime
    before: datetime | None = None
    up_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Retained:
    """A noun of the rules. `about` are its rows, `since` counts their age, `free` are unneeded ones.

    `first` are tables whose rows go with it, by the column that names it: the database does not remove them itself.
    `named` tells the ids that texts name, of plans after a place and jobs changed since a moment.
    """

    table: Table
    about: Callable[[datetime], ColumnElement[bool]] = field(default=lambda _now: and_(True))
    since: ColumnElement[datetime]
    free: Callable[[datetime | None], ColumnElement[bool]] = field(default=lambda _before: and_(True))
    first: tuple[Column[str], ...] = ()
    named: Callable[[Connection, int, datetime | None], set[str]] | None = None


def last_to_go(connection: Connection, kept: Retained, most: int, now: datetime) -> int | None:
    """The place of the newest row after the `most` newest; None if there is none."""
    place = kept.table.c.sequence
    query = select(place).where(kept.about(now)).order_by(place.desc()).offset(most).limit(1)
    return connection.execute(query).scalar_one_or_none()


def look(connection: Connection, kept: Retained, bounds: OldRows, after: int) -> tuple[tuple[int, ...], int | None]:
    """The places of the next rows that may be removed, and where the slice after them begins; None at the end."""
    place = kept.table.c.sequence
    scanned = select(place).where(place > after).order_by(place).limit(SLICE).subquery()
    count, last = connection.execute(select(func.count(), func.max(scanned.c.sequence))).one()
    query = select(place).where(place > after, place <= (last or after), _may_go(kept, bounds)).order_by(place)
    return tuple(connection.execute(query).scalars()), last if count == SLICE else None


def newest_plan(connection: Connection) -> int:
    """The place of the newest plan; 0 where there is none."""
    return connection.execute(select(func.max(plans.c.sequence))).scalar_one() or 0


def remove(connection: Connection, kept: Retained, bounds: OldRows, places: Sequence[int], spared: set[str]) -> int:
    """Removes those of the rows that may still be removed and are not `spared`; returns how many."""
    place, identity = kept.table.c.sequence, kept.table.c.get("id")
    rows = select(place if identity is None else identity).where(place.in_(places), _may_go(kept, bounds))
    going = [one for one in connection.execute(rows).scalars() if one not in spared]
    for column in kept.first:
        connection.execute(delete(column.table).where(column.in_(going)))
    connection.execute(delete(kept.table).where((place if identity is None else identity).in_(going)))
    return len(going)


def _may_go(kept: Retained, bounds: OldRows) -> ColumnElement[bool]:
    old = [kept.since < bounds.before] if bounds.before is not None else []
    beyond = [kept.table.c.sequence <= bounds.up_to] if bounds.up_to is not None else []
    return and_(kept.about(bounds.now), or_(*old, *beyond), kept.free(bounds.before))


def _has_run() -> ColumnElement[bool]:
    return exists().where(runs.c.job_id == jobs.c.id)


def _runs_in(*states: str) -> Retained:
    """Runs that came to one of these states, with their jobs, measurements and events."""

    def about(_now: datetime) -> ColumnElement[bool]:
        return and_(jobs.c.state.in_(states), _has_run())

    return Retained(table=jobs, about=about, since=jobs.c.updated_at, first=(runs.c.job_id,))


def _not_the_newest(_before: datetime | None) -> ColumnElement[bool]:
    """Events that are not their subject's newest, from which its numbers continue."""
    later = events.alias()
    of_job = exists().where(later.c.job_id == events.c.job_id, later.c.number > events.c.number)
    of_run = exists().where(later.c.run_id == events.c.run_id, later.c.number > events.c.number)
    return or_(of_job, of_run)


def _unneeded_plans(before: datetime | None) -> ColumnElement[bool]:
    """Plans without a run, at which no alias points or has pointed since: moving an alias back must stay possible."""
    needed = [exists().where(runs.c.plan_id == plans.c.id), exists().where(aliases.c.plan_id == plans.c.id)]
    name, place = alias_moves.c.name, alias_moves.c.sequence
    left_at = func.lead(alias_moves.c.moved_at, type_=UtcTime()).over(partition_by=name, order_by=place)
    moves_after = func.row_number().over(partition_by=name, order_by=place.desc()) - 1
    moves = select(alias_moves.c.plan_id, left_at.label("left_at"), moves_after.label("after")).subquery()
    # Without an age: each alias's last move.
    lately = moves.c.after == 1 if before is None else moves.c.left_at >= before
    left = select(moves.c.plan_id).where(moves.c.plan_id.is_not(None), lately)
    return and_(*(~one for one in needed), plans.c.id.not_in(left))


def _unneeded(table: Table, name: str) -> Callable[[datetime | None], ColumnElement[bool]]:
    """Documents from which no plan was made, and which no remaining job produced."""

    def free(_before: datetime | None) -> ColumnElement[bool]:
        return and_(*(~exists().where(other.c[name] == table.c.id) for other in (plans, jobs)))

    return free


def _used(table: Table) -> ColumnElement[datetime]:
    since: ColumnElement[datetime] = func.coalesce(table.c.used_at, table.c.created_at, type_=UtcTime())
    return since


def _profiles_named(connection: Connection, after: int, changed: datetime | None) -> set[str]:
    """The profiles of jobs that have not ended, and of kept plans that were requested with several profiles."""
    several = plans.c.request.like('%"other\\_profile\\_ids":["%', escape="\\")
    rows = connection.execute(select(plans.c.request).where(plans.c.sequence > after, several)).scalars()
    return _ids_in([*_waiting_tasks(connection, changed), *rows])


def _clusters_named(connection: Connection, _after: int, changed: datetime | None) -> set[str]:
    """The clusters of jobs that have not ended."""
    return _ids_in(_waiting_tasks(connection, changed))


def _ids_in(texts: Iterable[str]) -> set[str]:
    """Everything in documents that could be an id. A document that only another release can read counts, too."""
    return {name for text in texts for name in _ID.findall(text)}


def _waiting_tasks(connection: Connection, changed: datetime | None) -> Iterable[str]:
    query = select(jobs.c.task).where(jobs.c.state.in_(("queued", "leased")))
    return connection.execute(query if changed is None else query.where(jobs.c.updated_at >= changed)).scalars()


NOUNS: dict[str, Retained] = {
    "runs": _runs_in("succeeded"),
    "abandoned-runs": _runs_in(*ABANDONED),
    "jobs": Retained(
        table=jobs, about=lambda _now: and_(jobs.c.state.in_(ENDED), ~_has_run()), since=jobs.c.updated_at
    ),
    "plans": Retained(table=plans, since=_used(plans), free=_unneeded_plans),
    "profiles": Retained(
        table=profiles, since=_used(profiles), free=_unneeded(profiles, "profile_id"), named=_profiles_named
    ),
    "clusters": Retained(
        table=clusters, since=_used(clusters), free=_unneeded(clusters, "cluster_id"), named=_clusters_named
    ),
    "agents": Retained(table=agents, since=agents.c.last_seen_at, free=lambda _before: agents.c.job_id.is_(None)),
    "events": Retained(table=events, since=events.c.created_at, free=_not_the_newest),
    "audit": Retained(table=audit, since=audit.c.created_at),
    "tokens": Retained(
        table=tokens,
        about=lambda now: or_(tokens.c.revoked_at.is_not(None), tokens.c.expires_at <= now),
        since=func.coalesce(tokens.c.revoked_at, tokens.c.expires_at, type_=UtcTime()),
        first=(sessions.c.token_id,),
    ),
}
"""The nouns of the rules, in the order in which they must be removed."""
