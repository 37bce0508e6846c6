"""Tokens: made, listed, revoked, and looked up for whoever sends one."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from pipeplan.errors import ConflictError, NotFoundError, PipeplanError
from planner_service.contract.listing import Page
from planner_service.contract.tokens import (
    SCOPES,
    TOKEN_PREFIX,
    CreatedToken,
    Identity,
    NewToken,
    Token,
    TokenState,
    allowed,
    new_credential,
)
from planner_service.services.context import Context, found
from planner_service.services.token_keys import TokenKey, token_key
from planner_service.storage import tokens as storage
from planner_service.storage.listing import Cut
from planner_service.storage.tokens import StoredToken

USE_NOTED_S = 60.0
"""A token's last use is written down at most this often: reads stay reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is kept about a credential. None of `identity` is true before the secret is proven against the hash."""

    identity: Identity
    secret_hash: str
    expires_at: datetime | None


def create(context: Context, new: NewToken, *, by: str) -> CreatedToken:
    """Makes a token. Its text is in the answer and nowhere else."""
    key = token_key(context)
    now = context.now()
    credential = new_credential(TOKEN_PREFIX)
    stored = StoredToken(
        id=credential.id,
        name=new.name,
        scopes=tuple(scope for scope in SCOPES if scope in new.scopes),
        secret_hash=key.hash(credential.secret),
        key_id=key.id,
        created_by=by,
        created_at=now,
        expires_at=None if new.expires_in_s is None else now + timedelta(seconds=new.expires_in_s),
        revoked_at=None,
        last_used_at=None,
    )
    with context.database.write() as connection:
        storage.add(connection, stored)
    return CreatedToken(**_token(stored, key, now).model_dump(), token=credential.text())


def newest(context: Context, cut: Cut) -> Page[Token]:
    """A page of tokens, newest first."""
    key = token_key(context)
    now = context.now()
    with context.database.read() as connection:
        return storage.page(connection, cut, lambda stored: _token(stored, key, now))


def get(context: Context, token_id: str) -> Token:
    """A token. Raises NotFoundError."""
    key = token_key(context)
    with context.database.read() as connection:
        return _token(found("token", token_id, storage.get(connection, token_id)), key, context.now())


def revoke(context: Context, token_id: str) -> Token:
    """Ends a token for good. Raises NotFoundError."""
    key = token_key(context)
    now = context.now()
    with context.database.write() as connection:
        found("token", token_id, storage.get(connection, token_id))
        storage.revoke(connection, token_id, now)
        return _token(found("token", token_id, storage.get(connection, token_id)), key, now)


def id_of(context: Context, name_or_id: str) -> str:
    """A token's id, from its id or a name that one valid token alone has. Raises NotFoundError, ConflictError."""
    with context.database.read() as connection:
        if storage.get(connection, name_or_id) is not None:
            return name_or_id
        of_this_name = storage.named(connection, name_or_id, context.now())
    if not of_this_name:
        raise NotFoundError(f"there is no token {name_or_id!r} that could be revoked")
    if len(of_this_name) > 1:
        ids = ", ".join(token.id for token in of_this_name)
        raise ConflictError(f"{len(of_this_name)} tokens have the name {name_or_id!r}: give the id, one of {ids}")
    return of_this_name[0].id


def require_any_valid(context: Context, host: str) -> None:
    """Raises PipeplanError where nobody could pass: a service that demands tokens starts only once there is one."""
    key = token_key(context)
    with context.database.read() as connection:
        if storage.any_valid(connection, key.id, context.now()):
            return
    raise PipeplanError(
        f"the service does not start on {host}, where every request needs a token: there is no valid one; "
        "`pipeplan token create --name admin --scope admin` makes the first (with the same --database)"
    )


def known(context: Context, key: TokenKey, token_id: str) -> Known | None:
    """What is kept about a token; None where it is unknown, revoked, expired or made under another key."""
    with context.database.read() as connection:
        stored = storage.get(connection, token_id)
    return known_token(stored) if stored is not None and is_valid(stored, key, context.now()) else None


def known_token(stored: StoredToken) -> Known:
    """What is kept about a token that is valid."""
    identity = Identity(name=stored.name, scopes=allowed(stored.scopes), token_id=stored.id)
    return Known(identity=identity, secret_hash=stored.secret_hash, expires_at=stored.expires_at)


def is_valid(stored: StoredToken, key: TokenKey, now: datetime) -> bool:
    """Whether the service takes the token."""
    return _state(stored, key, now) == "valid"


def note_use(context: Context, token_id: str) -> None:
    """Writes down that the token was used just now, unless another process has done so within the minute."""
    now = context.now()
    with context.database.write() as connection:
        storage.touch(connection, token_id, now, now - timedelta(seconds=USE_NOTED_S))


def _token(stored: StoredToken, key: TokenKey, now: datetime) -> Token:
    return Token(
        id=stored.id,
        name=stored.name,
        scopes=stored.scopes,
        state=_state(stored, key, now),
        created_by=stored.created_by,
        created_at=stored.created_at,
        expires_at=stored.expires_at,
        revoked_at=stored.revoked_at,
        last_used_at=stored.last_used_at,
    )


def _state(stored: StoredToken, key: TokenKey, now: datetime) -> TokenState:
    if stored.revoked_at is not None:
        return "revoked"
    if stored.expires_at is not None and stored.expires_at <= now:
        return "expired"
    return "valid" if stored.key_id == key.id else "foreign"
