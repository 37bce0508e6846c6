"""`pipeplan settings`: every setting of the service, its value, and where that comes from."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.documents.files import dump

Config = Annotated[
    Path | None, typer.Option("--config", help="A TOML file of settings, for what nothing else sets. [PIPEPLAN_CONFIG]")
]


def settings(
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Shows the service's settings: what they are, mean, and were set by. Secrets are masked."""
    from planner_service.commands.tables import show_table
    from planner_service.settings import resolve_settings

    shown = resolve_settings(config=config).shown()
    if as_json:
        typer.echo(dump({"settings": [asdict(setting) for setting in shown]}))
        return
    rows = [(row.name, "" if row.value is None else str(row.value), row.source, row.meaning) for row in shown]
    show_table(("setting", "value", "from", "meaning"), rows)
