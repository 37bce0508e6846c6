"""Tokens, the sessions that they open, and the key under which their secrets are hashed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, delete, insert, or_, select, update

from pipeplan.protocol.listing import Page
from pipeplan.protocol.tokens import SCOPES, Scope
from planner_service.platform.listing import Cut, insert_once, newest
from planner_service.platform.stored import columns_of
from planner_service.platform.tables import server_keys, sessions, tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredToken:
    """A token as it is stored. `key_id` names the key under which its secret was hashed."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    secret_hash: str
    key_id: str
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


def server_key(connection: Connection, name: str) -> str | None:
    return connection.execute(select(server_keys.c.value).where(server_keys.c.name == name)).scalar_one_or_none()


def add_server_key(connection: Connection, name: str, value: str, now: datetime) -> None:
    insert_once(connection, insert(server_keys).values(name=name, value=value, created_at=now))


def add(connection: Connection, token: StoredToken) -> None:
    """Stores a new token."""
    connection.execute(insert(tokens).values(asdict(token) | {"scopes": " ".join(token.scopes)}))


def get(connection: Connection, token_id: str) -> StoredToken | None:
    """The token."""
    row = connection.execute(select(tokens).where(tokens.c.id == token_id)).one_or_none()
    return None if row is None else _token(row)


def page(connection: Connection, cut: Cut, item: Callable[[StoredToken], T]) -> Page[T]:
    """A page of the tokens, newest first, including expired and revoked ones."""
    return newest(connection, select(tokens), tokens, cut, lambda row: item(_token(row)))


def any_valid(connection: Connection, key_id: str, now: datetime) -> bool:
    """Whether there is a token that the service would accept."""
    query = select(tokens.c.sequence).where(tokens.c.key_id == key_id, *_valid(now)).limit(1)
    return connection.execute(query).one_or_none() is not None


def named(connection: Connection, name: str, now: datetime) -> list[StoredToken]:
    return [_token(row) for row in connection.execute(select(tokens).where(tokens.c.name == name, *_valid(now)))]


def beginning(connection: Connection, head: str) -> list[str]:
    """The ids that begin so. No hexadecimal digit comes after g."""
    query = select(tokens.c.id).where(tokens.c.id >= head, tokens.c.id < head + "g").order_by(tokens.c.id)
    return list(connection.execute(query).scalars())


def revoke(connection: Connection, token_id: str, now: datetime) -> None:
    """Revokes a token, and ends the sessions that it opened. The time of the first revocation stays."""
    ended = update(tokens).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None)).values(revoked_at=now)
    connection.execute(ended)
    connection.execute(delete(sessions).where(sessions.c.token_id == token_id))


def touch(connection: Connection, token_id: str, now: datetime, not_after: datetime) -> None:
    """Records that the token was used, unless another process has just done so."""
    stale = or_(tokens.c.last_used_at.is_(None), tokens.c.last_used_at <= not_after)
    connection.execute(update(tokens).where(tokens.c.id == token_id, stale).values(last_used_at=now))


def add_session(
    connection: Connection, *, session_id: str, secret_hash: str, token_id: str, now: datetime, expires_at: datetime
) -> None:
    """Stores a session, and deletes expired ones."""
    connection.execute(delete(sessions).where(sessions.c.expires_at <= now))
    values = {"id": session_id, "secret_hash": secret_hash, "token_id": token_id}
    connection.execute(insert(sessions).values(**values, created_at=now, expires_at=expires_at))


def session(connection: Connection, session_id: str) -> tuple[StoredToken, str, datetime] | None:
    """The token that opened the session, the hash of the session's secret, and when the session expires."""
    query: Select[Any] = (
        select(*tokens.c, sessions.c.secret_hash.label("session_hash"), sessions.c.expires_at.label("session_end"))
        .join(sessions, sessions.c.token_id == tokens.c.id)
        .where(sessions.c.id == session_id)
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else (_token(row), row.session_hash, row.session_end)


def end_session(connection: Connection, session_id: str) -> None:
    connection.execute(delete(sessions).where(sessions.c.id == session_id))


def _valid(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return (tokens.c.revoked_at.is_(None), or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > now))


def _token(row: Row[Any]) -> StoredToken:
    kept = set(row.scopes.split())
    return StoredToken(**columns_of(row, StoredToken) | {"scopes": tuple(s for s in SCOPES if s in kept)})
