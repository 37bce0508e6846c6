"""Tokens and sessions: made, listed, looked up and ended; and the key under which their secrets are hashed.

A session is a browser's login. It opens with a token, and ends with it at the latest.
"""

import hashlib
import hmac
import secrets
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta

from pipeplan.errors import ConflictError, NotFoundError, PipeplanError
from pipeplan.protocol.listing import Page
from pipeplan.protocol.plans import is_short_id
from pipeplan.protocol.tokens import (
    SCOPES,
    SESSION_PREFIX,
    TOKEN_PREFIX,
    CreatedToken,
    Credential,
    Identity,
    NewToken,
    Token,
    TokenState,
    allowed,
    new_credential,
)
from planner_service.access import store as storage
from planner_service.access.store import StoredToken
from planner_service.platform import trail
from planner_service.platform.context import Context, found
from planner_service.platform.listing import Cut

NAME = "tokens"
KEY_BYTES = 32

USE_NOTED_S = 60.0
"""The minimum interval between two writes of a token's last use: most read requests write nothing."""

SESSION_S = 12 * 3600

_FINGERPRINTED = b"the id of this key"


@dataclass(frozen=True, slots=True)
class TokenKey:
    """A key of 256 bits for a fast hash: secrets of 256 random bits cannot all be tried, so it need not be slow."""

    value: bytes = field(repr=False)

    @property
    def id(self) -> str:
        return self._digest(_FINGERPRINTED)[:16]

    def hash(self, secret: str) -> str:
        return self._digest(secret.encode())

    def proves(self, secret: str, secret_hash: str) -> bool:
        """Whether the hash is that of the secret. The time that this takes does not show where they differ."""
        return hmac.compare_digest(self.hash(secret), secret_hash)

    def _digest(self, text: bytes) -> str:
        return hmac.digest(self.value, text, "sha256").hex()


def token_key(context: Context) -> TokenKey:
    """The operator's key (PIPEPLAN_TOKEN_KEY), else the database's own, which is made when it is first needed."""
    if context.token_key is not None:
        return TokenKey(hashlib.sha256(context.token_key.encode()).digest())
    with context.database.read() as connection:
        value = storage.server_key(connection, NAME)
    if not value:
        with context.database.write() as connection:
            storage.add_server_key(connection, NAME, secrets.token_hex(KEY_BYTES), context.now())
            value = found("server key", NAME, storage.server_key(connection, NAME))
    return TokenKey(bytes.fromhex(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownToken:
    """A stored credential. `identity` is not proven until the secret is checked against the hash."""

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
        detail = f"{stored.name}, scopes {' '.join(stored.scopes)}"
        trail.record(connection, "token.create", stored.id, now, detail=detail)
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
        trail.record(connection, "token.revoke", token_id, now)
        return _token(found("token", token_id, storage.get(connection, token_id)), key, now)


def id_of(context: Context, given: str) -> str:
    """The id of a token given by its id, by a name that only one valid token has, or by the head of its id.

    Raises NotFoundError, or ConflictError where several tokens have the name or ids that begin so.
    """
    with context.database.read() as connection:
        if storage.get(connection, given) is not None:
            return given
        found = [token.id for token in storage.named(connection, given, context.now())]
        what = "the name"
        if not found and is_short_id(given):
            found, what = storage.beginning(connection, given), "an id that begins with"
    if not found:
        raise NotFoundError(f"there is no token {given!r} that could be revoked")
    if len(found) > 1:
        raise ConflictError(f"{len(found)} tokens have {what} {given!r}: give the id, one of {', '.join(found)}")
    return found[0]


def require_any_valid(context: Context, host: str) -> None:
    """Raises PipeplanError where there is no valid token: a service that requires one would admit no caller."""
    key = token_key(context)
    with context.database.read() as connection:
        if storage.any_valid(connection, key.id, context.now()):
            return
    raise PipeplanError(
        f"the service does not start on {host}, where every request needs a token: there is no valid one; "
        "`pipeplan token create --name admin --scope admin` makes the first (with the same --database)"
    )


def known(context: Context, key: TokenKey, token_id: str) -> KnownToken | None:
    """The stored token; None if it is unknown, revoked, expired or made under another key."""
    with context.database.read() as connection:
        stored = storage.get(connection, token_id)
    return known_token(stored) if stored is not None and is_valid(stored, key, context.now()) else None


def known_token(stored: StoredToken) -> KnownToken:
    """A valid token's credential."""
    identity = Identity(name=stored.name, scopes=allowed(stored.scopes), token_id=stored.id)
    return KnownToken(identity=identity, secret_hash=stored.secret_hash, expires_at=stored.expires_at)


def is_valid(stored: StoredToken, key: TokenKey, now: datetime) -> bool:
    return _state(stored, key, now) == "valid"


def note_use(context: Context, token_id: str) -> None:
    """Records that the token was used just now, unless another process has done so within the minute."""
    now = context.now()
    with context.database.write() as connection:
        storage.touch(connection, token_id, now, now - timedelta(seconds=USE_NOTED_S))


def _token(stored: StoredToken, key: TokenKey, now: datetime) -> Token:
    shown = {name: value for name, value in asdict(stored).items() if name in Token.model_fields}
    return Token(**shown, state=_state(stored, key, now))


def _state(stored: StoredToken, key: TokenKey, now: datetime) -> TokenState:
    if stored.revoked_at is not None:
        return "revoked"
    if stored.expires_at is not None and stored.expires_at <= now:
        return "expired"
    return "valid" if stored.key_id == key.id else "foreign"


def open_session(context: Context, key: TokenKey, identity: Identity) -> Credential:
    """Opens a session for the token's holder. The browser keeps a secret of the session, not the token."""
    if identity.token_id is None:
        raise LookupError("a session needs a token")
    credential = new_credential(SESSION_PREFIX)
    now = context.now()
    with context.database.write() as connection:
        storage.add_session(
            connection,
            session_id=credential.id,
            secret_hash=key.hash(credential.secret),
            token_id=identity.token_id,
            now=now,
            expires_at=now + timedelta(seconds=SESSION_S),
        )
        trail.record(connection, "session.open", identity.token_id, now)
    return credential


def known_by_session(context: Context, key: TokenKey, session_id: str) -> KnownToken | None:
    """The stored session; None if it is unknown or has ended, or its token is no longer valid."""
    now = context.now()
    with context.database.read() as connection:
        session = storage.session(connection, session_id)
    if session is None:
        return None
    stored, secret_hash, expires_at = session
    if expires_at <= now or not is_valid(stored, key, now):
        return None
    token = known_token(stored)
    ends = (expires_at, token.expires_at or expires_at)
    return KnownToken(identity=token.identity, secret_hash=secret_hash, expires_at=min(ends))


def end_session(context: Context, session_id: str) -> None:
    """Ends a session: its cookie is no longer valid."""
    with context.database.write() as connection:
        storage.end_session(connection, session_id)
        trail.record(connection, "session.end", None, context.now())
