"""Tokens for tests: made in the database, sent as clients send them."""

from pipeplan.protocol.tokens import NewToken, Scope
from planner_service.access import service as tokens
from planner_service.platform.context import Context


def made(context: Context, *scopes: Scope, name: str = "ci", expires_in_s: int | None = 3600) -> str:
    """A new token's text."""
    return tokens.create(context, NewToken(name=name, scopes=scopes, expires_in_s=expires_in_s), by="test").token


def bearer(token: str) -> dict[str, str]:
    """The header that a caller sends."""
    return {"Authorization": f"Bearer {token}"}
