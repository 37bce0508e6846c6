"""`pipeplan db`: the service's database."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeplan.cli.console import require_extra, working
from pipeplan.errors import InvalidInputError, require
from planner_service.platform.rules import KEPT, UNASKED, Rule, age_s, parse_rules

if TYPE_CHECKING:
    from planner_service.platform.database import Database

ABANDONED = "abandoned-runs"

app = typer.Typer(no_args_is_help=True)

DatabaseUrl = Annotated[str | None, typer.Option("--database", help="The database's URL. [PIPEPLAN_DATABASE_URL]")]
Config = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings. [PIPEPLAN_CONFIG]")]
BackupFile = Annotated[Path, typer.Argument(metavar="FILE", help="The backup: a SQLite file of the same tables.")]


@app.callback()
def group() -> None:
    """The service's database."""


@app.command()
def upgrade(database: DatabaseUrl = None, config: Config = None) -> None:
    """Brings the database to this version's tables. `pipeplan serve` does it at its start, too."""
    with _opened(database, config) as opened:
        from planner_service.platform import migrations

        before = migrations.revision_of(opened)
        with working("bringing the tables up to date"):
            migrations.upgrade(opened)
        typer.echo(f"{opened.shown}: revision {before or 'none'} -> {migrations.head()}", err=True)


@app.command()
def downgrade(
    revision: Annotated[str, typer.Argument(help="The revision to go back to, such as 0002; base: no tables at all.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before everything is removed (base).")] = False,
    database: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Reverts to an older revision. What only later revisions can hold is lost.

    `base` removes everything in the database, after a confirmation.
    """
    with _opened(database, config) as opened:
        from planner_service.platform import migrations

        asked = f"Remove all tables of {opened.shown}, with everything in them?"
        if revision == "base" and not yes and not typer.confirm(asked, err=True):
            typer.echo(f"{opened.shown}: nothing is removed", err=True)
            raise typer.Exit(1)
        before = migrations.revision_of(opened)
        migrations.downgrade(opened, revision)
        after = migrations.revision_of(opened)
        typer.echo(f"{opened.shown}: revision {before or 'none'} -> {after or 'none'}", err=True)


@app.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(help="Remove everything older: a number and s, m, h, d, w or y, as in 90d.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=0, help="Keep this many of each noun, the newest, and remove the others.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(KEPT)}; may be repeated.")] = None,
    abandoned: Annotated[
        bool,
        typer.Option("--abandoned", help="Also remove runs that failed, died or were cancelled, and could be resumed."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be removed.")] = False,
    database: DatabaseUrl = None,
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Removes what is old or beyond a number. By default the setting `retention` says what.

    Kept are plans with a run that is kept or at which an alias has pointed since then, what kept plans were made from,
    jobs that have not ended, runs that can be resumed, valid tokens, the newest event of each job, the aliases'
    history.
    """
    given = _rules(older_than, keep, only, abandoned)
    with _opened(database, config) as opened:
        from pipeplan.planners.solve import solve
        from planner_service.platform import migrations
        from planner_service.platform.context import Context
        from planner_service.platform.settings import load_settings
        from planner_service.upkeep import service as retention

        rules = given or parse_rules(load_settings(config=config, database_url=database).retention)
        rule = "must be given, or --keep, where the setting retention (PIPEPLAN_RETENTION) is empty"
        require(bool(rules), "older_than", rule, older_than)
        with working("looking for what is old" if dry_run else "removing what is old"):
            migrations.upgrade(opened)
            counts = retention.prune(Context(database=opened, solve=solve), rules, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps({"dry_run": dry_run, "removed": counts}))
        return
    went = ", ".join(f"{count} {noun}" for noun, count in counts.items())
    typer.echo(f"{opened.shown}: {'would remove' if dry_run else 'removed'} {went}", err=True)


def _rules(older_than: str | None, keep: int | None, only: list[str] | None, abandoned: bool) -> dict[str, Rule]:
    """The rules that the options give; none where neither an age nor a number is given."""
    for noun in only or ():
        require(noun in KEPT, "only", f"must be one of {', '.join(KEPT)}", noun)
    older_than_s = None if older_than is None else age_s(older_than)
    if older_than is not None and older_than_s is None:
        raise InvalidInputError("older_than", "must be a number and one of s, m, h, d, w, y, such as 90d", older_than)
    if older_than is None and keep is None:
        require(not only and not abandoned, "older_than", "must be given, or --keep, with --only or --abandoned", None)
        return {}
    nouns = [noun for noun in KEPT if noun in only] if only else [noun for noun in KEPT if noun not in UNASKED]
    rule = Rule(older_than_s=older_than_s, most=keep)
    return dict.fromkeys(nouns, rule) | ({ABANDONED: rule} if abandoned else {})


@app.command()
def backup(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="The backup: a SQLite file of the same tables; default: pipeplan-TIME.sqlite3 in the folder of the "
            "setting backup_folder, or in the current one.",
        ),
    ] = None,
    database: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Writes the database to a new file. It is one consistent state, while others continue to write."""
    with _opened(database, config) as opened:
        from planner_service.platform import migrations
        from planner_service.platform.settings import load_settings
        from planner_service.upkeep import backups

        if file is None:
            folder = load_settings(config=config, database_url=database).backup_folder or Path()
            backups.prepare(folder)
            file = folder.absolute() / backups.name_at(datetime.now(UTC))
        with working("writing the backup"):
            migrations.backup(opened, file)
        typer.echo(f"{opened.shown} -> {file} ({file.stat().st_size} bytes)", err=True)


@app.command()
def restore(file: BackupFile, database: DatabaseUrl = None, config: Config = None) -> None:
    """Puts a backup into an empty database, of either kind."""
    with _opened(database, config) as opened:
        from planner_service.platform import migrations

        with working("reading the backup into the database"):
            migrations.restore(opened, file)
        typer.echo(f"{file} -> {opened.shown}", err=True)


@contextmanager
def _opened(database: str | None, config: Path | None) -> "Iterator[Database]":
    require_extra("service")
    from planner_service.platform.database import Database
    from planner_service.platform.settings import load_settings
    from planner_service.platform.trail import at_the_console

    opened = Database(load_settings(config=config, database_url=database).database_url)
    try:
        with at_the_console():
            yield opened
    finally:
        opened.close()
