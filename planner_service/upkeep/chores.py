"""Chores: scheduled tasks, each claimed by one of the services on a database.

A service claims a chore that is due by an update, for a limited time. The update has no effect if another service has
claimed the chore first. Each part of the work renews the claim in its own transaction, under the claim's fence. A
service that was suspended until another one took over the chore therefore writes nothing more. During a single long
part another thread renews the claim, which thus expires soon after its service has died.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Connection, insert, or_, select, update

from pipeplan.errors import PipeplanError
from planner_service.platform.context import Context
from planner_service.platform.listing import insert_once
from planner_service.platform.tables import chores

HELD_S = 120.0
"""How long a service holds a chore after its last sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoreClaim:
    """A chore that this service holds for `held_s`, under a fence that no other claim of it has.

    It was due `overdue_s` ago.
    """

    name: str
    fence: int
    overdue_s: float
    held_s: float


def claim(context: Context, name: str, every_s: float, held_s: float = HELD_S) -> ChoreClaim | None:
    """Claims a chore that is due; None if it is not due, or another service holds it.

    A time that lies further ahead than the chore's interval or its claim can set it does not count: the clock was set
    back since, or the setting was made shorter.
    """
    now = context.now()
    due = _passed_or_beyond(chores.c.due_at, now, every_s)
    free = or_(chores.c.held_until.is_(None), _passed_or_beyond(chores.c.held_until, now, held_s))
    known = select(chores.c.name).where(chores.c.name == name)
    with context.database.read() as connection:
        new = connection.execute(known).one_or_none() is None
        if not new and connection.execute(known.where(due, free)).one_or_none() is None:
            return None
    claimed = (
        update(chores)
        .where(chores.c.name == name, due, free)
        .values(fence=chores.c.fence + 1, held_until=now + timedelta(seconds=held_s))
        .returning(chores.c.fence, chores.c.due_at)
    )
    with context.database.write() as connection:
        if new:
            insert_once(connection, insert(chores).values(name=name, fence=0, due_at=now))
        row = connection.execute(claimed).one_or_none()
    if row is None:
        return None
    return ChoreClaim(name=name, fence=row.fence, overdue_s=(now - row.due_at).total_seconds(), held_s=held_s)


def is_held(connection: Connection, held: ChoreClaim, now: datetime) -> bool:
    """Renews the claim; False if another service has taken the chore over."""
    until = now + timedelta(seconds=held.held_s)
    return connection.execute(update(chores).where(*_is(held)).values(held_until=until)).rowcount == 1


@contextmanager
def renewed(context: Context, held: ChoreClaim, every_s: float) -> Iterator[None]:
    """Renews the claim again and again until the block ends. A renewal that fails is followed by the next one."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(every_s):
            with suppress(PipeplanError), context.database.write() as connection:
                is_held(connection, held, context.now())

    beside = threading.Thread(target=renew, name=f"renewal of {held.name}", daemon=True)
    beside.start()
    try:
        yield
    finally:
        over.set()
        beside.join()


def end(context: Context, held: ChoreClaim, due_at: datetime) -> None:
    """Ends the claim; the chore is due again then."""
    with context.database.write() as connection:
        connection.execute(update(chores).where(*_is(held)).values(held_until=None, due_at=due_at))


def _passed_or_beyond(column: ColumnElement[datetime], now: datetime, longest_s: float) -> ColumnElement[bool]:
    return or_(column <= now, column > now + timedelta(seconds=longest_s))


def _is(held: ChoreClaim) -> tuple[ColumnElement[bool], ...]:
    return chores.c.name == held.name, chores.c.fence == held.fence
