"""Idempotency: a request that comes again under its Idempotency-Key has one effect, and the same answer again.

The answer is stored in the transaction of the effect: whatever fails in between, both are there or neither. A request
whose effect takes long holds its key meanwhile, and a service that dies with it lets the key go after a while.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from sqlalchemy import Connection

from pipeplan.errors import ConflictError, InFlightError, InvalidInputError, require
from planner_service.services.context import Context
from planner_service.storage import idempotency as storage
from planner_service.storage.idempotency import Name, Reply

FIELD = "Idempotency-Key"
MAX_CHARACTERS = 200
KEPT = timedelta(hours=24)
"""How long a key is known."""

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A caller's key for a request, which `fingerprint` tells from others."""

    name: Name
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An answer, and whether it was given before."""

    reply: Reply
    replayed: bool = False


def key_of(caller: str, key: str, fingerprint: str) -> Key:
    """The key, if it can be one. Raises InvalidInputError."""
    rule = f"must have 1 to {MAX_CHARACTERS} printable characters"
    require(0 < len(key) <= MAX_CHARACTERS and key.isprintable(), FIELD, rule, key)
    return Key(name=(caller, key), fingerprint=fingerprint)


def perform(context: Context, key: Key | None, effect: Callable[[Context], Reply], *, secret: bool = False) -> Outcome:
    """The effect's answer, or the one that it had before under this key; both are stored in one transaction.

    The effect must do all that it does through the context that it is given. Of one that is refused nothing is kept.
    `secret`: the answer's body is not kept, and a repetition is a conflict that says where the thing is.
    Raises InvalidInputError where the key was used for another request.
    """
    if key is None:
        return Outcome(reply=effect(context))
    with context.database.write() as connection:
        known = _take(context, connection, key, timedelta())
        if known is not None:
            return Outcome(reply=known, replayed=True)
        reply = effect(replace(context, database=context.database.joining(connection)))
        storage.settle(connection, key.name, replace(reply, body=None) if secret else reply)
        return Outcome(reply=reply)


def hold(context: Context, key: Key, duration_s: float) -> Outcome | None:
    """Takes a request whose effect takes long; its answer where it has one. Raises InFlightError while it is held."""
    with context.database.write() as connection:
        known = _take(context, connection, key, timedelta(seconds=duration_s))
    return None if known is None else Outcome(reply=known, replayed=True)


def settle(connection: Connection, key: Key | None, reply: Reply) -> None:
    """Keeps the answer of a request that was held, in the transaction of its effect."""
    if key is not None:
        storage.settle(connection, key.name, reply)


def let_go(context: Context, key: Key) -> None:
    """Frees the key of a request that was held and had no effect."""
    with context.database.write() as connection:
        storage.forget(connection, key.name)


def prune(context: Context) -> int:
    """Removes the keys that are over; how many there were."""
    with context.database.write() as connection:
        return storage.prune(connection, context.now())


def _take(context: Context, connection: Connection, key: Key, held: timedelta) -> Reply | None:
    """Takes the key for this request (None), or gives the answer that is known."""
    now = context.now()
    until, expires = now + held, now + KEPT
    if storage.add(connection, key.name, key.fingerprint, until, expires):
        return None
    entry = storage.get(connection, key.name)
    if entry is None:
        raise InFlightError(f"the {FIELD} {key.name[1]!r} is just being let go", retry_after_s=RETRY_AFTER_S)
    if entry.expires_at <= now:
        storage.renew(connection, key.name, key.fingerprint, until, expires)
        return None
    if entry.fingerprint != key.fingerprint:
        raise InvalidInputError(FIELD, "must not be used again for another request", key.name[1])
    if entry.reply is not None:
        return _repeated(entry.reply)
    if entry.held_until > now:
        sentence = f"the request under the {FIELD} {key.name[1]!r} is being worked on"
        raise InFlightError(sentence, retry_after_s=RETRY_AFTER_S)
    storage.renew(connection, key.name, key.fingerprint, until, expires)
    return None


def _repeated(reply: Reply) -> Reply:
    if reply.body is None:
        where = f": {reply.location}" if reply.location else ""
        raise ConflictError(f"the request under this {FIELD} was done{where}; its answer held a secret, shown once")
    return reply
