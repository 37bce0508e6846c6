"""`pipeplan`: planning offline, and queries against a service.

Other packages add their commands by entry points. If the command line names a command, the modules of other commands
are not loaded. Modules of commands import heavy packages inside their functions: `pipeplan --help` loads all of these
modules, and must stay quick.
"""

import sys
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import typer

from pipeplan.cli.console import EPILOG, GroupedCommand, VersionAsked, run_app, run_command
from pipeplan.errors import MissingDependencyError

COMMANDS = {
    "solve": "solve",
    "calibrate": "calibrate",
    "check": "check",
    "lock": "lock",
    "clusters": "clusters",
    "simulate": "simulate",
    "smallest": "questions",
    "largest": "questions",
    "sweep": "questions",
    "audit": "audit",
}
"""The library's commands in the order of the help, and their modules in `pipeplan.cli`."""

GROUPS = ("profile", "plan", "agents", "alias")
"""Its groups of commands, each the `app` of a module."""

ENTRY_POINTS = "pipeplan.commands"
"""The entry points of further commands: a function is a command, a `typer.Typer` a group of them."""


def build_app(asked: str | None = None) -> typer.Typer:
    """The command with the commands of all installed packages.

    If `asked` is a command or a group of them, with that one alone.
    """
    app = typer.Typer(
        name="pipeplan",
        help="Finds the fastest pipeline-parallel configuration that fits, and says why.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        epilog=EPILOG,
    )

    @app.callback()
    def pipeplan(version: VersionAsked = False) -> None:
        """Finds the fastest pipeline-parallel configuration that fits, and says why."""

    own = asked in COMMANDS or asked in GROUPS
    entries = [] if own else sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
    alone = own or any(entry.name == asked for entry in entries)
    for name, module in COMMANDS.items():
        if name == asked or not alone:
            app.command(cls=GroupedCommand)(getattr(import_module(f"pipeplan.cli.{module}"), name))
    for name in GROUPS:
        if name == asked or not alone:
            app.add_typer(import_module(f"pipeplan.cli.{name}").app, name=name)
    for entry in entries:
        if entry.name == asked or not alone:
            _add(app, entry)
    return app


def _add(app: typer.Typer, entry: EntryPoint) -> None:
    """Adds another package's commands. One that cannot be loaded becomes a command that says why; the others work."""
    try:
        added = entry.load()
    except ImportError as error:
        reason = f"the command {entry.name} cannot be loaded from {entry.value}: {error}"

        def broken() -> None:
            raise MissingDependencyError(reason)

        broken.__doc__ = f"Not there: {error}."
        app.command(entry.name)(broken)
        return
    if isinstance(added, typer.Typer):
        app.add_typer(added, name=entry.name)
    else:
        app.command(entry.name)(added)


def main() -> None:
    """The command's entry point. It may be interrupted while it still loads its commands."""
    run_command(lambda: run_app(build_app(sys.argv[1] if len(sys.argv) > 1 else None)))
