"""`pipeplan solve`: plans offline, from a profile and a cluster in files."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import answer_document, dump, read
from pipeplan.documents.plan import Answer, Infeasible
from pipeplan.documents.profile import Profile
from pipeplan.planners.problem import Options, PlanningProblem, unobserved
from pipeplan.planners.solve import PLANNERS
from pipeplan.planners.solve import solve as ask
from planner_service.commands.calibrate import read_calibration
from planner_service.commands.files import write_document
from planner_service.commands.planner_options import takes_options
from planner_service.commands.solver_progress import shown
from planner_service.contract.console import INFEASIBLE


@takes_options
def solve(
    profile: Annotated[list[Path], typer.Option(help="The profile's file; for unequal devices one for each type.")],
    cluster: Annotated[Path, typer.Option(help="The cluster's file.")],
    planner: Annotated[str, typer.Option(help=", ".join(PLANNERS))],
    batch_size: Annotated[int, typer.Option(help="Samples in a batch.")],
    options: Options,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    calibration: Annotated[Path | None, typer.Option(help="Corrects the costs: `pipeplan calibrate` wrote it.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write the document there.")] = None,
) -> None:
    """Finds the fastest plan that fits; where none does, says by how much (exit status 3)."""
    problem = PlanningProblem(
        profile=read(Profile, profile[0]),
        cluster=read(Cluster, cluster),
        batch_size=batch_size,
        options=options,
        calibration=read_calibration(calibration),
        other_profiles=tuple(read(Profile, other) for other in profile[1:]),
    )
    started_s = time.perf_counter()
    with shown() if planner == "exact" else nullcontext(unobserved) as observe:
        answer = ask(planner, problem, observe)
    document = dump(answer_document(answer) | {"solve_time_s": time.perf_counter() - started_s})
    if output is not None:
        write_document(output, document)
    if as_json:
        typer.echo(document)
    _show(answer, in_full=not as_json)


def _show(answer: Answer, *, in_full: bool) -> None:
    """The plan as tables and a picture; the reasons against all plans on standard error, whatever was asked for."""
    if isinstance(answer, Infeasible):
        from planner_service.commands.plan_tables import show_reasons

        show_reasons(answer)
        raise SystemExit(INFEASIBLE)
    if in_full:
        from planner_service.commands.solution import show_solution

        show_solution(answer)
