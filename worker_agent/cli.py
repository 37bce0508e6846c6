"""`pipeplan-agent`: profiles and runs models on this node. Wires the sub-commands together."""

import typer

from pipeplan.cli.console import EPILOG, GroupedCommand, VersionAsked, run_app
from worker_agent.commands.blocks import blocks
from worker_agent.commands.export import export
from worker_agent.commands.models import models
from worker_agent.commands.profile import profile
from worker_agent.commands.prune import prune
from worker_agent.commands.run import run
from worker_agent.commands.start import start

app = typer.Typer(
    name="pipeplan-agent",
    help="Measures models on this node, runs plans on it, and exports what they trained.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EPILOG,
)

app.command()(models)
app.command()(blocks)
app.command(cls=GroupedCommand)(profile)
app.command(cls=GroupedCommand)(run)
app.command()(start)
app.command()(export)
app.command()(prune)


@app.callback()
def agent(version: VersionAsked = False) -> None:
    """Measures models on this node, runs plans on it, and exports what they trained."""


def main() -> None:
    run_app(app)
