"""`pipeplan audit`: who did what to the service's database."""

from typing import TYPE_CHECKING, Annotated

import typer

from pipeplan.cli.service import AsJson, Cursor, Limit, Token, Url, service_at, show_page

if TYPE_CHECKING:
    from pipeplan.protocol.audit import AuditEntry


def audit(
    action: Annotated[str | None, typer.Option(help="What was done, such as alias.put or token.revoke.")] = None,
    outcome: Annotated[str | None, typer.Option(help="done, begun, refused or failed.")] = None,
    actor: Annotated[str | None, typer.Option(help="The name of the token; local, nobody or console.")] = None,
    agent: Annotated[str | None, typer.Option(help="The agent in whose name it was done.")] = None,
    object_id: Annotated[str | None, typer.Option("--object", help="The id or name of what it was done to.")] = None,
    since: Annotated[str | None, typer.Option(help="From this moment on, such as 2026-01-31T12:00:00Z.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Shows who did what, and what was refused to whom. The newest comes first. It needs the scope admin."""
    from pipeplan.documents.files import parse
    from pipeplan.documents.names import on_one_line
    from pipeplan.protocol.audit import AuditQuery

    asked = {"action": action, "outcome": outcome, "actor": actor, "agent": agent, "object_id": object_id}
    asked["created_after"] = since
    query = parse(AuditQuery, {name: value for name, value in asked.items() if value is not None})
    with service_at(url, token) as service:
        page = service.audit(query, limit=limit, cursor=cursor).page()

    def row(entry: "AuditEntry") -> tuple[str, ...]:
        who, what = entry.actor + (f" ({entry.agent})" if entry.agent else ""), entry.object_id or ""
        outcome = entry.outcome + (f" {entry.status}" if entry.status else "")
        about = (f"{entry.created_at:%Y-%m-%d %H:%M:%S}", on_one_line(who), entry.via, entry.action)
        return (*about, on_one_line(what), outcome, on_one_line(entry.detail or ""))

    show_page(page, ("when", "who", "via", "action", "object", "outcome", "detail"), row, as_json=as_json)
