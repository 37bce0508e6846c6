"""Trail: who is acting, and the entries of the audit log, written in the transaction of the action.

The code that admits a request or a command sets `ATTEMPT`; code that writes calls `record`. Actions that the service
takes by itself have no attempt, and leave no entry.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, insert

from pipeplan.documents.names import on_one_line
from pipeplan.protocol.audit import Action, Outcome, Via
from pipeplan.protocol.tokens import masked
from planner_service.platform.logs import REQUEST_ID
from planner_service.platform.tables import audit

MOST_CHARACTERS = 200
MOST_DETAIL = 1000


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The actor, and the interface."""

    actor: str
    via: Via
    token_id: str | None = None


ATTEMPT: ContextVar[Attempt | None] = ContextVar("pipeplan_attempt", default=None)


@contextmanager
def at_the_console() -> Iterator[None]:
    """Marks the block as a command on the database itself."""
    token = ATTEMPT.set(Attempt(actor="console", via="command"))
    try:
        yield
    finally:
        ATTEMPT.reset(token)


def record(
    connection: Connection,
    action: Action,
    object_id: str | None,
    now: datetime,
    *,
    agent: str | None = None,
    outcome: Outcome = "done",
    status: int | None = None,
    detail: str | None = None,
) -> None:
    """Appends an entry for the present attempt, in the attempt's transaction. Without an attempt it does nothing."""
    attempt = ATTEMPT.get()
    if attempt is None:
        return
    entry = {
        "created_at": now,
        "action": action,
        "outcome": outcome,
        "object_id": _plain(object_id, MOST_CHARACTERS),
        "actor": _plain(attempt.actor, MOST_CHARACTERS),
        "token_id": attempt.token_id,
        "agent": _plain(agent, MOST_CHARACTERS),
        "via": attempt.via,
        "status": status,
        "detail": _plain(detail, MOST_DETAIL),
        "request_id": None if attempt.via == "command" else REQUEST_ID.get(),
    }
    connection.execute(insert(audit).values(entry))


def _plain(text: str | None, most: int) -> str | None:
    """The text as one line, without texts that look like secrets: a path may hold anything."""
    return None if text is None else masked(on_one_line(text))[:most]
