"""Sessions: a browser's login, opened with a token, and over with it at the latest."""

from datetime import timedelta

from planner_service.contract.tokens import SESSION_PREFIX, Credential, Identity, new_credential
from planner_service.services import tokens
from planner_service.services.context import Context
from planner_service.services.token_keys import TokenKey
from planner_service.services.tokens import Known
from planner_service.storage import tokens as storage

SESSION_S = 12 * 3600


def open_session(context: Context, key: TokenKey, identity: Identity) -> Credential:
    """A new session of the token's holder. What the browser keeps is a secret of its own, not the token."""
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
    return credential


def known(context: Context, key: TokenKey, session_id: str) -> Known | None:
    """What is kept about a session; None where it is unknown or over, or its token is no longer valid."""
    now = context.now()
    with context.database.read() as connection:
        session = storage.session(connection, session_id)
    if session is None or session.expires_at <= now or not tokens.is_valid(session.token, key, now):
        return None
    token = tokens.known_token(session.token)
    ends = (session.expires_at, token.expires_at or session.expires_at)
    return Known(identity=token.identity, secret_hash=session.secret_hash, expires_at=min(ends))


def end_session(context: Context, session_id: str) -> None:
    """Ends a session: its cookie is worth nothing any more."""
    with context.database.write() as connection:
        storage.end_session(connection, session_id)
