"""`pipeplan`: planning offline, and queries against a service.

Other packages add their commands by entry points. Modules of commands import what is heavy inside their functions:
`pipeplan --help` loads all of these modules, and must stay quick.
"""

from importlib.metadata import EntryPoint, entry_points

import typer

from pipeplan.cli import (
    agents,
    alias,
    audit,
    calibrate,
    check,
    clusters,
    lock,
    plan,
    profile,
    questions,
    simulate,
    solve,
)
from pipeplan.cli.console import EPILOG, GroupedCommand, VersionAsked, run_app
from pipeplan.errors import MissingDependencyError

GROUP = "pipeplan.commands"
"""The entry points of further commands: a function is a command, a `typer.Typer` a group of them."""


def build_app() -> typer.Typer:
    """The command with all that is installed beside the library."""
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

    for command in (
        solve.solve,
        calibrate.calibrate,
        check.check,
        lock.lock,
        clusters.clusters,
        simulate.simulate,
        questions.smallest,
        questions.largest,
        questions.sweep,
        audit.audit,
    ):
        app.command(cls=GroupedCommand)(command)
    app.add_typer(profile.app, name="profile")
    app.add_typer(plan.app, name="plan")
    app.add_typer(agents.app, name="agents")
    app.add_typer(alias.app, name="alias")
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        _add(app, entry)
    return app


def _add(app: typer.Typer, entry: EntryPoint) -> None:
    """Adds what another package brings. One that cannot be loaded becomes a command that says why; the others work."""
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
    """The command's entry point."""
    run_app(build_app())
