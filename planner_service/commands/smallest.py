"""`pipeplan smallest`: the fewest devices of a cluster that train at a given throughput."""

import dataclasses
from typing import Annotated, Any

import typer

from pipeplan.documents.files import dump, plan_document
from pipeplan.planners.problem import Options
from pipeplan.questions.smallest import Smallest, SmallestStep
from pipeplan.questions.smallest import smallest as ask
from planner_service.commands.asking import (
    AsJson,
    BatchSize,
    CalibrationFile,
    ClusterFile,
    PlannerName,
    ProfileFile,
    planner_named,
    progress_bar,
    read_problem,
    show_warnings,
)
from planner_service.commands.planner_options import takes_options
from planner_service.contract.console import INFEASIBLE


@takes_options
def smallest(
    profile: ProfileFile,
    cluster: ClusterFile,
    batch_size: BatchSize,
    throughput: Annotated[float, typer.Option(help="Samples a second that are wanted.")],
    options: Options,
    planner: PlannerName = "pipedream-2bw",
    calibration: CalibrationFile = None,
    as_json: AsJson = False,
) -> None:
    """Finds the fewest devices that reach a throughput; exit status 3 where the whole cluster does not.

    Devices are the cluster's first: 1, 2, ... of a server, then whole servers, and so on. Plans are judged by their
    simulated throughput where they are simulated.
    """
    problem = read_problem(profile, cluster, batch_size, options, calibration)
    with progress_bar("planning") as on_progress:
        found = ask(problem, planner_named(planner), throughput, on_progress)
    if as_json:
        typer.echo(dump(_document(found) | {"warnings": problem.warnings}))
    else:
        _show(found)
    if found.plan is None:
        show_warnings(problem, err=True)
        raise SystemExit(INFEASIBLE)


def _document(found: Smallest) -> dict[str, Any]:
    document = dataclasses.asdict(found) | {"feasible": found.plan is not None}
    return document | {"plan": plan_document(found.plan) if found.plan is not None else None}


def _show(found: Smallest) -> None:
    from planner_service.commands.solution import show_solution

    wanted = f"{found.throughput_samples_per_s:,.4g} samples/s"
    if found.plan is None:
        best = found.fastest
        typer.echo(f"no part of the cluster reaches {wanted}" + (f"; nearest: {_step(best)}" if best else ""), err=True)
        return
    typer.echo(f"{found.devices} devices reach {wanted}")
    if found.next_fewer is not None:
        typer.echo(f"the next fewer: {_step(found.next_fewer)}")
    typer.echo("")
    show_solution(found.plan)


def _step(step: SmallestStep) -> str:
    gives = step.reason if step.throughput_samples_per_s is None else f"{step.throughput_samples_per_s:,.4g} samples/s"
    return f"{step.devices} devices, {gives}"
