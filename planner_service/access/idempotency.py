"""Idempotency: a POST repeated under its Idempotency-Key has one effect, and gets the same answer again.

Under each key of a caller the database keeps the request, and its answer once there is one. The answer is stored in the
transaction of the effect: whatever fails in between, both are there or neither. A request whose effect takes long holds
its key in the meantime. If the service dies with it, the key becomes free after a while.

Three parts: the rows (`add_key` to `prune_keys`), what is done once (`perform`, `hold`, `settle`), and the header.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from pipeplan.errors import ConflictError, InFlightError, InvalidInputError, require
from planner_service.access.auth import Caller
from planner_service.platform.context import Context
from planner_service.platform.listing import insert_once
from planner_service.platform.requests import SMALL, Body
from planner_service.platform.tables import idempotency_keys as table

FIELD = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
MAX_CHARACTERS = 200
KEPT = timedelta(hours=24)
"""How long a key is remembered."""

RETRY_AFTER_S = 1.0

Name = tuple[str, str]
"""The caller, and the key that it chose."""

KeyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="1 to 200 characters of the caller's choice: the same request again under the same key has no "
        "second effect and the same answer, for 24 hours",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer as it was given. `body` is None if it held a secret, which is not stored."""

    status: int
    body: str | None
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request under a key. `reply` is None while the request is in progress, until `held_until` at the latest."""

    fingerprint: str
    reply: Reply | None
    held_until: datetime
    expires_at: datetime


def add_key(connection: Connection, name: Name, fingerprint: str, held_until: datetime, expires_at: datetime) -> bool:
    """Stores a request under a key unless there is one; says whether it did. A second one waits for the first."""
    row = insert(table).values(
        caller=name[0], key=name[1], fingerprint=fingerprint, held_until=held_until, expires_at=expires_at
    )
    return insert_once(connection, row)


def stored_key(connection: Connection, name: Name) -> Entry | None:
    """The record under a key; nobody else changes it until the transaction ends."""
    row = connection.execute(select(table).where(_is(name)).with_for_update()).one_or_none()
    if row is None:
        return None
    reply = None if row.status is None else Reply(status=row.status, body=row.body, location=row.location)
    return Entry(fingerprint=row.fingerprint, reply=reply, held_until=row.held_until, expires_at=row.expires_at)


def renew_key(connection: Connection, name: Name, fingerprint: str, held_until: datetime, expires_at: datetime) -> None:
    """Stores a request under a key whose former request has expired."""
    values: dict[str, Any] = {"status": None, "body": None, "location": None}
    row = update(table).where(_is(name))
    connection.execute(row.values(fingerprint=fingerprint, held_until=held_until, expires_at=expires_at, **values))


def settle_key(connection: Connection, name: Name, reply: Reply) -> None:
    """Stores the request's answer, in the transaction of its effect. The first answer stays."""
    row = update(table).where(_is(name), table.c.status.is_(None))
    connection.execute(row.values(status=reply.status, body=reply.body, location=reply.location))


def forget_key(connection: Connection, name: Name) -> None:
    """Frees the key of a request that had no effect."""
    connection.execute(delete(table).where(_is(name), table.c.status.is_(None)))


def prune_keys(connection: Connection, now: datetime) -> int:
    return connection.execute(delete(table).where(table.c.expires_at <= now)).rowcount


def _is(name: Name) -> ColumnElement[bool]:
    caller, key = name
    return (table.c.caller == caller) & (table.c.key == key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A caller's key for a request; `fingerprint` distinguishes the request from others."""

    name: Name
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OnceOutcome:
    """An answer, and whether it was given before."""

    reply: Reply
    replayed: bool = False


def key_of(caller: str, key: str, fingerprint: str) -> Key:
    """The key, if it can be one. Raises InvalidInputError."""
    rule = f"must have 1 to {MAX_CHARACTERS} printable characters"
    require(0 < len(key) <= MAX_CHARACTERS and key.isprintable(), FIELD, rule, key)
    return Key(name=(caller, key), fingerprint=fingerprint)


def perform(
    context: Context, key: Key | None, effect: Callable[[Context], Reply], *, secret: bool = False
) -> OnceOutcome:
    """The effect's answer, or the one that was given before under this key; effect and answer are one transaction.

    The effect must do all that it does through the context that it gets. Of a refused effect nothing is stored. If the
    answer is `secret`, its body is not stored, and a repeated request is a conflict that says where the result is.
    Raises InvalidInputError if the key was used for another request.
    """
    if key is None:
        return OnceOutcome(reply=effect(context))
    with context.database.write() as connection:
        known = _take(context, connection, key, timedelta())
        if known is not None:
            return OnceOutcome(reply=known, replayed=True)
        reply = effect(replace(context, database=context.database.joining(connection)))
        settle_key(connection, key.name, replace(reply, body=None) if secret else reply)
        return OnceOutcome(reply=reply)


def hold(context: Context, key: Key, duration_s: float) -> OnceOutcome | None:
    """Holds the key of a request whose effect takes long, or returns its stored answer.

    Raises InFlightError while another holds it.
    """
    with context.database.write() as connection:
        known = _take(context, connection, key, timedelta(seconds=duration_s))
    return None if known is None else OnceOutcome(reply=known, replayed=True)


def settle(connection: Connection, key: Key | None, reply: Reply) -> None:
    """Stores the answer of a request that held its key, in the transaction of its effect."""
    if key is not None:
        settle_key(connection, key.name, reply)


def let_go(context: Context, key: Key) -> None:
    """Frees the key of a request that held it and had no effect."""
    with context.database.write() as connection:
        forget_key(connection, key.name)


def prune(context: Context) -> int:
    """Deletes the expired keys, and returns their number."""
    with context.database.write() as connection:
        return prune_keys(connection, context.now())


def _take(context: Context, connection: Connection, key: Key, held: timedelta) -> Reply | None:
    """Takes the key for this request and returns None, or returns the stored answer."""
    now = context.now()
    until, expires = now + held, now + KEPT
    if add_key(connection, key.name, key.fingerprint, until, expires):
        return None
    entry = stored_key(connection, key.name)
    if entry is None:
        raise InFlightError(f"the {FIELD} {key.name[1]!r} is just being released", retry_after_s=RETRY_AFTER_S)
    if entry.expires_at <= now:
        renew_key(connection, key.name, key.fingerprint, until, expires)
        return None
    if entry.fingerprint != key.fingerprint:
        raise InvalidInputError(FIELD, "must not be used again for another request", key.name[1])
    if entry.reply is not None:
        if entry.reply.body is None:
            where = f": {entry.reply.location}" if entry.reply.location else ""
            sentence = f"the request under this {FIELD} was done{where}; its answer held a secret, shown once"
            raise ConflictError(sentence)
        return entry.reply
    if entry.held_until > now:
        sentence = f"the request under the {FIELD} {key.name[1]!r} is being worked on"
        raise InFlightError(sentence, retry_after_s=RETRY_AFTER_S)
    renew_key(connection, key.name, key.fingerprint, until, expires)
    return None


async def _of_body(request: Request, caller: Caller, content: Body, idempotency_key: KeyHeader = None) -> Key | None:
    key = partial(_key, request, caller.token_id or caller.name, idempotency_key, content)
    return key() if len(content) <= SMALL else await run_in_threadpool(key)  # hashing a large body takes long


async def _of_path(request: Request, caller: Caller, idempotency_key: KeyHeader = None) -> Key | None:
    return _key(request, caller.token_id or caller.name, idempotency_key, b"")


OnceKey = Annotated[Key | None, Depends(_of_body)]
"""The key of a POST that has a body; None without the header."""

OncePathKey = Annotated[Key | None, Depends(_of_path)]
"""The key of a POST without a body; None without the header."""


def model_reply(model: BaseModel, *, status: int = 200, location: str | None = None) -> Reply:
    return Reply(status=status, body=model.model_dump_json(), location=location)


def once_response(outcome: OnceOutcome) -> Response:
    """The answer as it goes over the wire, the first time and again."""
    reply = outcome.reply
    headers = {REPLAYED: "true"} if outcome.replayed else {}
    if reply.location is not None:
        headers["Location"] = reply.location
    return Response(reply.body or "", reply.status, headers, "application/json")


def _key(request: Request, caller: str, given: str | None, content: bytes) -> Key | None:
    """The key that the header gives, with the fingerprint of method, path, query and body."""
    if given is None:
        return None
    asked = f"{request.method} {request.url.path}?{request.url.query}\n".encode()
    digest = hashlib.sha256(asked)
    digest.update(content)
    return key_of(caller, given, digest.hexdigest())
