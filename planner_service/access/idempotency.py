"""Idempotency: a POST repeated under its Idempotency-Key has one effect, and gets the same answer again.

The database stores, by caller and key, the request and later its answer. The answer is stored in the transaction of the
effect: after any failure, both exist or neither. A request whose effect takes long reserves its key in the meantime. If
the service dies, the reservation expires.

Two parts: the single effect (`perform`, `hold`, `settle`), and the header.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Annotated

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
    """An answer as it was given. `body` is None if it contained a secret, which is not stored."""

    status: int
    body: str | None
    location: str | None = None


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
        settle(connection, key, replace(reply, body=None) if secret else reply)
        return OnceOutcome(reply=reply)


def hold(context: Context, key: Key, duration_s: float) -> OnceOutcome | None:
    """Holds the key of a request whose effect takes long, or returns its stored answer.

    Raises InFlightError while another holds it.
    """
    with context.database.write() as connection:
        known = _take(context, connection, key, timedelta(seconds=duration_s))
    return None if known is None else OnceOutcome(reply=known, replayed=True)


def settle(connection: Connection, key: Key | None, reply: Reply) -> None:
    """Stores the request's answer, in the transaction of its effect. The first answer stays."""
    if key is not None:
        row = update(table).where(_is(key.name), table.c.status.is_(None))
        connection.execute(row.values(status=reply.status, body=reply.body, location=reply.location))


def let_go(context: Context, key: Key) -> None:
    """Frees the key of a request that reserved it and had no effect."""
    with context.database.write() as connection:
        connection.execute(delete(table).where(_is(key.name), table.c.status.is_(None)))


def prune(context: Context) -> int:
    """Deletes the expired keys, and returns their number."""
    with context.database.write() as connection:
        return connection.execute(delete(table).where(table.c.expires_at <= context.now())).rowcount


def _take(context: Context, connection: Connection, key: Key, held: timedelta) -> Reply | None:
    """Takes the key for this request and returns None, or returns the stored answer."""
    now = context.now()
    (caller, name), held_until = key.name, now + held
    values = {"fingerprint": key.fingerprint, "held_until": held_until, "expires_at": now + KEPT}
    if insert_once(connection, insert(table).values(caller=caller, key=name, **values)):  # a second one waits here
        return None
    known = connection.execute(select(table).where(_is(key.name)).with_for_update()).one_or_none()
    if known is None:
        raise InFlightError(f"the {FIELD} {name!r} is just being released", retry_after_s=RETRY_AFTER_S)
    if known.expires_at > now:
        if known.fingerprint != key.fingerprint:
            raise InvalidInputError(FIELD, "must not be used again for another request", name)
        if known.status is not None and known.body is None:
            where = f": {known.location}" if known.location else ""
            sentence = f"the request under this {FIELD} was done{where}; its answer held a secret, shown once"
            raise ConflictError(sentence)
        if known.status is not None:
            return Reply(status=known.status, body=known.body, location=known.location)
        if known.held_until > now:
            sentence = f"the request under the {FIELD} {name!r} is being worked on"
            raise InFlightError(sentence, retry_after_s=RETRY_AFTER_S)
    row = update(table).where(_is(key.name))  # its former request has expired, or had no effect
    connection.execute(row.values(status=None, body=None, location=None, **values))
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
