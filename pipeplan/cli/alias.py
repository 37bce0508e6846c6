"""`pipeplan alias`: names that point at plans, for CI and people to pin."""

from typing import Annotated

import typer

from pipeplan.cli.service import AsJson, Cursor, Limit, Token, Url, service_at, show_page
from pipeplan.protocol.plans import Alias, AliasQuery

app = typer.Typer(no_args_is_help=True, help="Names that point at plans, with their history.")

Name = Annotated[str, typer.Argument(help="The alias, such as gpt-prod.")]
IfVersion = Annotated[
    int | None, typer.Option(help="Only if the alias still has this version: nobody has moved it since.")
]


@app.command("set")
def set_alias(
    name: Name,
    plan: Annotated[str, typer.Argument(metavar="ID_OR_ALIAS", help="The plan that the alias will point at.")],
    if_version: IfVersion = None,
    new: Annotated[bool, typer.Option("--new", help="Only if there is no such alias yet.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Points an alias at a plan."""
    with service_at(url, token) as service:
        alias = service.set_alias(name, service.plan_id(plan), if_version=if_version, only_new=new)
    _show(alias, as_json=as_json)


@app.command()
def get(name: Name, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Shows where an alias points."""
    with service_at(url, token) as service:
        alias = service.alias(name)
    _show(alias, as_json=as_json)


@app.command("list")
def list_aliases(
    plan: Annotated[str | None, typer.Option(help="Only those that point at this plan.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Lists aliases, newest first."""
    with service_at(url, token) as service:
        query = AliasQuery(plan_id=None if plan is None else service.plan_id(plan))
        page = service.aliases(query, limit=limit, cursor=cursor).page()
    headings = ("Alias", "Plan", "Version", "Moved by", "At (UTC)")
    show_page(
        page,
        headings,
        lambda one: (one.name, one.plan_id, str(one.version), one.moved_by, f"{one.moved_at:%Y-%m-%d %H:%M}"),
        as_json=as_json,
    )


@app.command()
def history(
    name: Name, limit: Limit = 50, cursor: Cursor = None, url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Shows what an alias pointed at, the newest first.

    It also shows who moved it.
    """
    with service_at(url, token) as service:
        page = service.alias_history(name, limit=limit, cursor=cursor).page()
    show_page(
        page,
        ("At (UTC)", "Plan", "Version", "Moved by"),
        lambda it: (f"{it.moved_at:%Y-%m-%d %H:%M}", it.plan_id or "(deleted)", str(it.version), it.moved_by),
        as_json=as_json,
    )


@app.command()
def delete(name: Name, if_version: IfVersion = None, url: Url = None, token: Token = None) -> None:
    """Deletes an alias; its history stays."""
    with service_at(url, token) as service:
        service.delete_alias(name, if_version=if_version)
    typer.echo(f"alias {name} is gone; `pipeplan alias history {name}` shows where it pointed", err=True)


def _show(alias: Alias, *, as_json: bool) -> None:
    if as_json:
        typer.echo(alias.model_dump_json(indent=2))
        return
    moved = f"{alias.moved_by}, {alias.moved_at:%Y-%m-%d %H:%M} UTC"
    typer.echo(f"{alias.name} -> {alias.plan_id}  (version {alias.version}, moved by {moved})")
