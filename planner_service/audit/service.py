"""Audit: the log's entries, and those of attempts that were refused or failed, each in a separate transaction."""

from pipeplan.protocol.audit import Action, AuditEntry, AuditQuery, Outcome
from pipeplan.protocol.listing import Page
from planner_service.audit import store as storage
from planner_service.platform import trail
from planner_service.platform.context import Context


def page(context: Context, query: AuditQuery) -> Page[AuditEntry]:
    """The entries that the query asks for."""
    with context.database.read() as connection:
        return storage.page(connection, query)


def note_refusal(context: Context, action: Action, object_id: str | None, status: int) -> None:
    """Appends that the present attempt had no effect."""
    outcome: Outcome = "failed" if status >= 500 else "refused"
    with context.database.write() as connection:
        trail.record(connection, action, object_id, context.now(), outcome=outcome, status=status)
