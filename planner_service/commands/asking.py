"""What the commands that ask a planner many times share: the problem from files, and a bar on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import read
from pipeplan.documents.profile import Profile
from pipeplan.planners.problem import Options, Planner, PlanningProblem
from pipeplan.planners.solve import PLANNERS, solve
from planner_service.commands.calibrate import read_calibration

ProfileFile = Annotated[Path, typer.Option("--profile", help="The profile's file.")]
ClusterFile = Annotated[Path, typer.Option("--cluster", help="The cluster's file.")]
PlannerName = Annotated[str, typer.Option("--planner", help=", ".join(PLANNERS))]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Samples in a batch.")]
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", help="Corrects the costs: `pipeplan calibrate` wrote it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def read_problem(
    profile: Path, cluster: Path, batch_size: int, options: Options, calibration: Path | None
) -> PlanningProblem:
    """The problem in these files."""
    return PlanningProblem(
        profile=read(Profile, profile),
        cluster=read(Cluster, cluster),
        batch_size=batch_size,
        options=options,
        calibration=read_calibration(calibration),
    )


def show_warnings(problem: PlanningProblem, *, err: bool = False) -> None:
    """What its plans say of profiles that may not be of the cluster's devices."""
    for warning in problem.warnings:
        typer.echo(f"warning: {warning}", err=err)


def planner_named(name: str) -> Planner:
    """The planner as a function of the problem."""
    return lambda problem: solve(name, problem)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        yield on_progress
