"""The service on the command line: how commands find it, and how they show lists."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pipeplan.client.exchange import DEFAULT_URL

if TYPE_CHECKING:
    from pipeplan.client.client import Client
    from pipeplan.protocol.listing import Page

T = TypeVar("T")

PATIENCE_S = 2.0
"""How long a command retries if no service answers, or the service asks it to retry: somebody waits for it."""

Url = Annotated[str | None, typer.Option("--url", help=f"The service; default: PIPEPLAN_URL, else {DEFAULT_URL}.")]
Token = Annotated[
    str | None,
    typer.Option("--token", help="Its access token; default: PIPEPLAN_TOKEN, or the file in PIPEPLAN_TOKEN_FILE."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Limit = Annotated[int, typer.Option(min=1, max=200, help="How many at most.")]
Cursor = Annotated[str | None, typer.Option(help="The next_cursor that the list before ended with.")]


def service_at(url: str | None, token: str | None) -> "Client":
    """The client of a command."""
    from pipeplan.client.client import Client

    return Client(url, token, patience_s=PATIENCE_S)


def show_page(page: "Page[T]", headings: Sequence[str], row: Callable[[T], Sequence[str]], *, as_json: bool) -> None:
    """A page of a list: as one document, or as a table, with how to get the next page."""
    from pipeplan.cli.console import show_table

    if as_json:
        typer.echo(page.model_dump_json(indent=2))
        return
    show_table(headings, [row(item) for item in page.items])
    if page.next_cursor is not None:
        typer.echo(f"more: --cursor {page.next_cursor}")
