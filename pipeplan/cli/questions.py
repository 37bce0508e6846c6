"""Questions: the commands that ask a planner many times.

`pipeplan smallest`: the fewest devices of a cluster that train at a given throughput.
`pipeplan largest`: how large a model fits, by pipeline depth, schedule and recomputation.
`pipeplan sweep`: the best plan for each of several values of one quantity, as a table.

They share their flags, the problem from files, and a bar on standard error.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.calibrate import read_calibration
from pipeplan.cli.clusters import ClusterName, read_cluster, warn_of_gigabytes
from pipeplan.cli.console import INFEASIBLE, progress_lines, show_table
from pipeplan.cli.solve import PlannerName, takes_options
from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.files import dump, read
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, require, require_count
from pipeplan.formats import four_digits, size, spoken_document
from pipeplan.planners.problem import Options, Planner, PlanningProblem
from pipeplan.planners.solve import PLANNERS, solve
from pipeplan.planners.two_bw.planner import NAME
from pipeplan.questions.largest import inner_blocks
from pipeplan.questions.largest import largest as ask_largest
from pipeplan.questions.smallest import SmallestStep
from pipeplan.questions.smallest import smallest as ask_smallest
from pipeplan.questions.sweep import VARIED, SweepRow
from pipeplan.questions.sweep import sweep as ask_sweep

ProfileFile = Annotated[Path, typer.Option("--profile", help="The profile's file.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Samples in a batch.")]
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", help="Corrects the costs: `pipeplan calibrate` wrote it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]

MOST_DEPTHS = 64
"""The most depths that `largest` takes."""

MOST_VALUES = 1000
"""The most values that `sweep` takes."""


def read_problem(
    profile: Path, cluster: str, batch_size: int, options: Options, calibration: Path | None
) -> PlanningProblem:
    """The problem in these files; the cluster may have a name."""
    return PlanningProblem(
        profile=read(Profile, profile),
        cluster=read_cluster(cluster),
        batch_size=batch_size,
        options=options,
        calibration=read_calibration(calibration),
    )


def show_warnings(problem: PlanningProblem, *, err: bool = False) -> None:
    """Its plans' warnings about profiles that may not be of the cluster's devices."""
    for warning in problem.warnings:
        typer.echo(f"warning: {warning}", err=err)


def planner_named(name: str) -> Planner:
    return lambda problem: solve(name, problem)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, or lines if that is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        with progress_lines(title) as say:
            yield lambda done, total: say(f"{title}: {done} of {total}")
        return
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(title, total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        yield on_progress


@takes_options
def smallest(
    profile: ProfileFile,
    cluster: ClusterName,
    batch_size: BatchSize,
    throughput: Annotated[float, typer.Option(help="Samples a second to reach.")],
    options: Options,
    planner: PlannerName = "pipedream-2bw",
    calibration: CalibrationFile = None,
    as_json: AsJson = False,
) -> None:
    """Finds the fewest devices that reach a throughput. The exit status is 3 if the whole cluster does not.

    Devices are the cluster's first ones: 1, 2, ... of a server, then whole servers, and so on. Plans are judged by
    their played throughput; plans that are too long to play, by the closed form's.
    """
    from pipeplan.cli.plan_tables import show_solution

    problem = read_problem(profile, cluster, batch_size, options, calibration)
    with progress_bar("planning") as on_progress:
        found = ask_smallest(problem, planner_named(planner), throughput, on_progress)
    wanted = f"{four_digits(found.throughput_samples_per_s)} samples/s"
    if as_json:
        plan = spoken_document(found.plan) if found.plan is not None else None
        answer = dataclasses.asdict(found) | {"feasible": found.plan is not None, "plan": plan}
        typer.echo(dump(answer | {"warnings": problem.warnings}))
    elif found.plan is None:
        nearest = f"; nearest: {_step(found.fastest)}" if found.fastest else ""
        typer.echo(f"no part of the cluster reaches {wanted}{nearest}", err=True)
    else:
        typer.echo(f"{found.devices} devices reach {wanted}")
        if found.next_fewer is not None:
            typer.echo(f"the next fewer: {_step(found.next_fewer)}")
        typer.echo("")
        show_solution(found.plan)
    if found.plan is None:
        show_warnings(problem, err=True)
        raise SystemExit(INFEASIBLE)


def _step(step: SmallestStep) -> str:
    if step.closed_form_samples_per_s is None:
        gives = step.reason or ""
    elif step.throughput_samples_per_s is None:
        gives = f"{four_digits(step.closed_form_samples_per_s)} samples/s in closed form, not played"
    else:
        gives = f"{four_digits(step.throughput_samples_per_s)} samples/s"
    return f"{step.devices} devices, {gives}"


@takes_options
def largest(
    profile: ProfileFile,
    cluster: ClusterName,
    batch_size: BatchSize,
    options: Options,
    repeat: Annotated[
        str | None, typer.Option(help="Blocks start:stop to repeat, as in Python; default: all but first and last.")
    ] = None,
    depths: Annotated[str | None, typer.Option(help="Such as 1,4,8; default: 1, 2, 4, ... up to the devices.")] = None,
    calibration: CalibrationFile = None,
    as_json: AsJson = False,
) -> None:
    """Finds the largest model that fits at every pipeline depth. It repeats blocks (PipeDream-2BW, figure 9).

    Microbatches have the size asked for, or the smallest measured. Exit status 3 if nothing fits.
    """
    problem = read_problem(profile, cluster, batch_size, options, calibration)
    blocks = inner_blocks(problem.profile) if repeat is None else _blocks(repeat, len(problem.profile.blocks))
    devices = problem.cluster.devices
    wanted = [2**power for power in range(devices.bit_length())] if depths is None else _depths(depths, devices)
    with progress_bar("planning") as on_progress:
        sizes = ask_largest(problem, PLANNERS[NAME], blocks, wanted, on_progress)
    if as_json:
        repeated = {"start": blocks.start, "stop": blocks.stop}
        typer.echo(dump({"repeat": repeated, "sizes": sizes, "warnings": problem.warnings}))
    else:
        show_warnings(problem)
        typer.echo(f"blocks {blocks.start} to {blocks.stop - 1} repeated")
        headings = ("Stages", "Schedule", "Recompute", "Blocks", "Million parameters", "Weights", "What ends it")
        rows = [
            (
                str(each.depth),
                each.schedule,
                "yes" if each.recompute else "no",
                f"{each.blocks:,}" if each.blocks else "none",
                four_digits(each.parameters / 1e6),
                size(each.weight_bytes),
                each.limit,
            )
            for each in sizes
        ]
        show_table(headings, rows)
    if not any(each.blocks for each in sizes):
        raise SystemExit(INFEASIBLE)


def _blocks(text: str, blocks: int) -> range:
    start, colon, stop = text.partition(":")
    try:
        found = range(blocks)[slice(int(start) if start else None, int(stop) if stop else None)]
    except ValueError as error:
        raise InvalidInputError("repeat", "must be start:stop, such as 1:-1", text) from error
    require(bool(colon) and len(found) > 0, "repeat", f"must be start:stop with some of the {blocks} blocks", text)
    return found


def _depths(text: str, devices: int) -> list[int]:
    try:
        wanted = [int(depth) for depth in text.split(",")]
    except ValueError as error:
        raise InvalidInputError("depths", "must be whole numbers with commas between them", text) from error
    require(len(wanted) <= MOST_DEPTHS, "depths", f"must name at most {MOST_DEPTHS} depths", len(wanted))
    for depth in wanted:
        require_count("depths", depth)
        require(depth <= devices, "depths", f"must not be more than the devices ({devices})", depth)
    return wanted


BYTES = {"bandwidth": " of bytes a second", "memory": " of bytes"}
"""The quantities of a sweep that have a unit."""


@takes_options
def sweep(
    profile: ProfileFile,
    cluster: ClusterName,
    over: Annotated[
        str, typer.Option(help=f"WHAT=VALUE,VALUE,... of {', '.join(VARIED)}, in bytes and bytes a second.")
    ],
    options: Options,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a batch, unless it is varied.")] = None,
    planner: PlannerName = "pipedream-2bw",
    calibration: CalibrationFile = None,
    as_json: AsJson = False,
) -> None:
    """Plans for every value of one quantity.

    It is the batch size, the number of devices, the outermost bandwidth or a device's memory. Exit status 3 if no value
    has a plan that fits.
    """
    name, _, listed = over.partition("=")
    require(name in VARIED, "over", f"must be WHAT=VALUES, WHAT one of {', '.join(VARIED)}", over)
    try:
        values = [float(value) for value in listed.split(",")]
    except ValueError as error:
        rule = f"must be {name}= and numbers{BYTES.get(name, '')} with commas between them"
        raise InvalidInputError("over", rule, over) from error
    for value in values if name in BYTES else ():
        warn_of_gigabytes(f"--over {name}", value, a_second=name == "bandwidth")
    require(len(values) <= MOST_VALUES, "over", f"must name at most {MOST_VALUES} values", len(values))
    varied = name == "batch-size"
    require(varied or batch_size is not None, "batch-size", "is required unless it is varied", batch_size)
    problem = read_problem(profile, cluster, 1 if batch_size is None else batch_size, options, calibration)
    try:
        with progress_bar("planning") as on_progress:
            rows = ask_sweep(problem, planner_named(planner), name, values, on_progress)
    except InvalidInputError as error:
        if error.field != name:
            raise
        raise InvalidInputError("over", f"the {name} {error.rule}", error.value) from error
    if as_json:
        found = [
            {
                "value": row.value,
                "feasible": row.plan is not None,
                "plan": spoken_document(row.plan) if row.plan is not None else None,
                "reason": row.reason,
            }
            for row in rows
        ]
        typer.echo(dump({"over": name, "rows": found, "warnings": problem.warnings}))
    else:
        show_warnings(problem)
        what = ("Samples/s", "Closed form", "Schedule", "Stages x replicas", "Microbatches", "Most memory", "Why not")
        show_table((name, *what), [_cells(row) for row in rows])
    if all(row.plan is None for row in rows):
        raise SystemExit(INFEASIBLE)


def _cells(row: SweepRow) -> tuple[str, ...]:
    plan, value = row.plan, f"{row.value:,.12g}"
    if plan is None:
        return (value, *("–",) * 6, row.reason or "")
    played = plan.throughput_samples_per_s
    return (
        value,
        "–" if played is None else four_digits(played),
        four_digits(plan.closed_form.throughput_samples_per_s),
        plan.schedule,
        f"{plan.depth} x {plan.width or 'mixed'}",
        f"{plan.microbatches} x {plan.microbatch_size}",
        size(max(rank_bytes(plan))),
        "",
    )
