"""Idempotency keys: under each, by caller, the request that came with it, and its answer once there is one."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from planner_service.storage.listing import insert_once
from planner_service.storage.tables import idempotency_keys as table

Name = tuple[str, str]
"""Who calls, and the key that was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer as it was given. `body` is None where it held a secret, which is not kept."""

    status: int
    body: str | None
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request that was taken under a key; `reply` is None while it is worked on, which is until `held_until`."""

    fingerprint: str
    reply: Reply | None
    held_until: datetime
    expires_at: datetime


def add(connection: Connection, name: Name, fingerprint: str, held_until: datetime, expires_at: datetime) -> bool:
    """Takes a request under a key, unless there is one; says whether it did. Who comes second waits for the first."""
    row = insert(table).values(
        caller=name[0], key=name[1], fingerprint=fingerprint, held_until=held_until, expires_at=expires_at
    )
    return insert_once(connection, row)


def get(connection: Connection, name: Name) -> Entry | None:
    """What is kept under a key; nobody else changes it until the transaction ends."""
    row = connection.execute(select(table).where(_is(name)).with_for_update()).one_or_none()
    if row is None:
        return None
    reply = None if row.status is None else Reply(status=row.status, body=row.body, location=row.location)
    return Entry(fingerprint=row.fingerprint, reply=reply, held_until=row.held_until, expires_at=row.expires_at)


def renew(connection: Connection, name: Name, fingerprint: str, held_until: datetime, expires_at: datetime) -> None:
    """Takes a request anew under a key whose former one is over."""
    values: dict[str, Any] = {"status": None, "body": None, "location": None}
    row = update(table).where(_is(name))
    connection.execute(row.values(fingerprint=fingerprint, held_until=held_until, expires_at=expires_at, **values))


def settle(connection: Connection, name: Name, reply: Reply) -> None:
    """The request's answer, in the transaction of what it did. The first one stays."""
    row = update(table).where(_is(name), table.c.status.is_(None))
    connection.execute(row.values(status=reply.status, body=reply.body, location=reply.location))


def forget(connection: Connection, name: Name) -> None:
    """Frees the key of a request that had no effect."""
    connection.execute(delete(table).where(_is(name), table.c.status.is_(None)))


def prune(connection: Connection, now: datetime) -> int:
    """Removes the keys that are over; how many there were."""
    return connection.execute(delete(table).where(table.c.expires_at <= now)).rowcount


def _is(name: Name) -> ColumnElement[bool]:
    caller, key = name
    return (table.c.caller == caller) & (table.c.key == key)
