"""`pipeplan`: planning offline, the service, and queries against it. Wires the sub-commands together."""

import typer

from planner_service.commands import (
    agents,
    alias,
    calibrate,
    db,
    demo,
    largest,
    plan,
    profile,
    serve,
    settings,
    simulate,
    smallest,
    solve,
    sweep,
    token,
)
from planner_service.contract.console import run_app

app = typer.Typer(
    name="pipeplan",
    help="Finds the fastest pipeline-parallel configuration that fits, and says why.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.command()(demo.demo)
app.command()(serve.serve)
app.command()(settings.settings)
app.command()(solve.solve)
app.command()(calibrate.calibrate)
app.command()(simulate.simulate)
app.command()(smallest.smallest)
app.command()(largest.largest)
app.command()(sweep.sweep)
app.add_typer(profile.app, name="profile")
app.add_typer(plan.app, name="plan")
app.add_typer(agents.app, name="agents")
app.add_typer(alias.app, name="alias")
app.add_typer(db.app, name="db")
app.add_typer(token.app, name="token")


def main() -> None:
    """The command's entry point."""
    run_app(app)
