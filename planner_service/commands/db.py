"""`pipeplan db`: the service's database."""

from typing import Annotated

import typer

from planner_service.contract.extras import require_extra

app = typer.Typer(no_args_is_help=True)

DatabaseUrl = Annotated[str | None, typer.Option("--database", help="The database's URL. [PIPEPLAN_DATABASE_URL]")]


@app.callback()
def group() -> None:
    """The service's database."""


@app.command()
def upgrade(database: DatabaseUrl = None) -> None:
    """Brings the database to the tables that this version needs; `pipeplan serve` does it at its start, too."""
    require_extra("service")
    from planner_service.settings import load_settings
    from planner_service.storage import migrations
    from planner_service.storage.database import Database

    opened = Database(load_settings(database_url=database).database_url)
    try:
        before = migrations.revision_of(opened)
        migrations.upgrade(opened)
    finally:
        opened.close()
    typer.echo(f"{opened.shown}: revision {before or 'none'} -> {migrations.head()}", err=True)
