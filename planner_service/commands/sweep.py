"""`pipeplan sweep`: the best plan for one value after the other of what may be varied, as a table."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pipeplan.documents.files import dump, plan_document
from pipeplan.errors import InvalidInputError, require
from pipeplan.planners.problem import Options
from pipeplan.questions.sweep import VARIED, SweepRow
from pipeplan.questions.sweep import sweep as ask
from planner_service.commands.asking import (
    AsJson,
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

MOST_VALUES = 1000


@takes_options
def sweep(
    profile: ProfileFile,
    cluster: ClusterFile,
    over: Annotated[str, typer.Option(help=f"WHAT=VALUE,VALUE,... of {', '.join(VARIED)}.")],
    options: Options,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a batch, unless it is varied.")] = None,
    planner: PlannerName = "pipedream-2bw",
    calibration: CalibrationFile = None,
    as_json: AsJson = False,
) -> None:
    """Plans for every value of a batch size, number of devices, outermost bandwidth or memory of a device.

    Exit status 3 where no value has a plan that fits.
    """
    name, values = _parsed(over)
    varied = name == "batch-size"
    require(varied or batch_size is not None, "batch-size", "is required unless it is varied", batch_size)
    problem = read_problem(profile, cluster, 1 if batch_size is None else batch_size, options, calibration)
    with progress_bar("planning") as on_progress:
        rows = ask(problem, planner_named(planner), name, values, on_progress)
    if as_json:
        found = [_document(row) for row in rows]
        typer.echo(dump({"over": name, "rows": found, "warnings": problem.warnings}))
    else:
        show_warnings(problem)
        _show(name, rows)
    if all(row.plan is None for row in rows):
        raise SystemExit(INFEASIBLE)


def _parsed(text: str) -> tuple[str, list[float]]:
    name, _, listed = text.partition("=")
    require(name in VARIED, "over", f"must be WHAT=VALUES, WHAT one of {', '.join(VARIED)}", text)
    try:
        values = [float(value) for value in listed.split(",")]
    except ValueError as error:
        raise InvalidInputError("over", f"must be {name}= and numbers with commas between them", text) from error
    require(len(values) <= MOST_VALUES, "over", f"must name at most {MOST_VALUES} values", len(values))
    return name, values


def _document(row: SweepRow) -> dict[str, Any]:
    plan = plan_document(row.plan) if row.plan is not None else None
    return {"value": row.value, "feasible": row.plan is not None, "plan": plan, "reason": row.reason}


def _show(name: str, rows: Sequence[SweepRow]) -> None:
    from planner_service.commands.tables import show_table

    headings = (
        name,
        "Samples/s",
        "Simulated",
        "Schedule",
        "Stages x replicas",
        "Microbatches",
        "Most memory",
        "Why not",
    )
    show_table(headings, [_cells(row) for row in rows])


def _cells(row: SweepRow) -> tuple[str, ...]:
    from planner_service.dashboard.formats import size

    plan, value = row.plan, f"{row.value:,.12g}"
    if plan is None:
        return (value, *("–",) * 6, row.reason or "")
    simulated = plan.simulated
    return (
        value,
        f"{plan.throughput_samples_per_s:,.4g}",
        "–" if simulated is None else f"{simulated.throughput_samples_per_s:,.4g}",
        plan.schedule,
        f"{plan.depth} x {plan.width or 'mixed'}",
        f"{plan.microbatches} x {plan.microbatch_size}",
        size(max(stage.memory_bytes for stage in plan.stages)),
        "",
    )
