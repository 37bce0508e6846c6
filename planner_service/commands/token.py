"""`pipeplan token`: the tokens in the service's database.

It needs no running service: the first token is made before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeplan.cli.console import require_extra, show_table
from pipeplan.documents.files import parse
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.tokens import SCOPES, NewToken
from planner_service.platform.rules import age_s

if TYPE_CHECKING:
    from planner_service.platform.context import Context

LISTED = 200
"""The upper bound on the tokens of a list."""

app = typer.Typer(no_args_is_help=True, help="Tokens: who may use the service, kept in its database.")

DatabaseUrl = Annotated[str | None, typer.Option("--database", help="The database's URL. [PIPEPLAN_DATABASE_URL]")]
Config = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings. [PIPEPLAN_CONFIG]")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Who or what it is for; histories and logs show it.")],
    scope: Annotated[list[str], typer.Option(help=f"What it allows: {', '.join(SCOPES)}; may be repeated.")],
    expires: Annotated[str, typer.Option(help="The time until it expires: 12h, 90d, 1y, or never.")] = "90d",
    database: DatabaseUrl = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Makes a token and shows it once. The database keeps only its hash."""
    new = parse(NewToken, {"name": name, "scopes": list(dict.fromkeys(scope)), "expires_in_s": duration_s(expires)})
    with _context(database, config) as context:
        from planner_service.access import service as tokens

        created = tokens.create(context, new, by="console")
    if as_json:
        typer.echo(created.model_dump_json(indent=2))
        return
    typer.echo(created.token)
    until = "never expires" if created.expires_at is None else f"expires {_moment(created.expires_at)}"
    note = f"{created.name} ({', '.join(created.scopes)}) {until}; it is not shown again. Clients take PIPEPLAN_TOKEN."
    typer.echo(note, err=True)


@app.command("list")
def list_tokens(
    database: DatabaseUrl = None,
    config: Config = None,
    limit: Annotated[int, typer.Option(min=1, max=LISTED, help="How many at most.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="The next_cursor of the page before.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lists tokens, newest first, with the time of their last use."""
    with _context(database, config) as context:
        from planner_service.access import service as tokens
        from planner_service.platform.listing import Cut

        page = tokens.newest(context, Cut(limit=limit, cursor=cursor))
    if as_json:
        typer.echo(page.model_dump_json(indent=2))
        return
    headings = ("id", "name", "scopes", "state", "made by", "made", "expires", "last used")
    rows = [
        (
            *(it.id, it.name, " ".join(it.scopes), it.state, it.created_by),
            *map(_moment, (it.created_at, it.expires_at, it.last_used_at)),
        )
        for it in page.items
    ]
    show_table(headings, rows)
    if page.next_cursor is not None:
        typer.echo(f"more: --cursor {page.next_cursor}", err=True)


@app.command()
def revoke(
    token: Annotated[
        str, typer.Argument(metavar="ID|NAME", help="The token's id, its head, or its name if no other token has it.")
    ],
    database: DatabaseUrl = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Revokes a token for good. Running services refuse it within 2 seconds."""
    with _context(database, config) as context:
        from planner_service.access import service as tokens

        revoked = tokens.revoke(context, tokens.id_of(context, token))
    if as_json:
        typer.echo(revoked.model_dump_json(indent=2))
    else:
        typer.echo(f"{revoked.name} ({revoked.id}) is revoked", err=True)


def duration_s(text: str) -> int | None:
    """Seconds in a text such as 90d; None for never. Raises InvalidInputError."""
    if text == "never":
        return None
    life_s = age_s(text)
    if life_s is None:
        raise InvalidInputError("expires", "must be never, or a number and one of s, m, h, d, w, y, such as 90d", text)
    return life_s


@contextmanager
def _context(database: str | None, config: Path | None) -> "Iterator[Context]":
    """The context that the services need, on a database with the present tables."""
    require_extra("service")
    from pipeplan.planners.solve import solve
    from planner_service.platform.context import Context
    from planner_service.platform.database import Database
    from planner_service.platform.migrations import upgrade
    from planner_service.platform.settings import load_settings
    from planner_service.platform.trail import at_the_console

    settings = load_settings(config=config, database_url=database)
    opened = Database(settings.database_url)
    try:
        upgrade(opened)
        with at_the_console():
            yield Context(database=opened, solve=solve, token_key=settings.token_key)
    finally:
        opened.close()


def _moment(moment: datetime | None) -> str:
    return "never" if moment is None else f"{moment:%Y-%m-%d %H:%M} UTC"
