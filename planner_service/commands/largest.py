"""`pipeplan largest`: how large a model fits, by pipeline depth, schedule and recomputation."""

from collections.abc import Sequence
from typing import Annotated

import typer

from pipeplan.documents.files import dump
from pipeplan.errors import InvalidInputError, require, require_count
from pipeplan.planners.problem import Options
from pipeplan.planners.two_bw.planner import NAME
from pipeplan.questions.largest import LargestSize, inner_blocks
from pipeplan.questions.largest import largest as ask
from planner_service.commands.asking import (
    AsJson,
    BatchSize,
    CalibrationFile,
    ClusterFile,
    ProfileFile,
    planner_named,
    progress_bar,
    read_problem,
    show_warnings,
)
from planner_service.commands.planner_options import takes_options
from planner_service.contract.console import INFEASIBLE

MOST_DEPTHS = 64


@takes_options
def largest(
    profile: ProfileFile,
    cluster: ClusterFile,
    batch_size: BatchSize,
    options: Options,
    repeat: Annotated[
        str | None, typer.Option(help="Blocks start:stop to repeat, as in Python; default: all but first and last.")
    ] = None,
    depths: Annotated[str | None, typer.Option(help="Such as 1,4,8; default: 1, 2, 4, ... up to the devices.")] = None,
    calibration: CalibrationFile = None,
    as_json: AsJson = False,
) -> None:
    """Finds the largest model that fits at every pipeline depth (PipeDream-2BW, figure 9), by repeating blocks.

    Microbatches are of the size asked for, or the smallest measured. Exit status 3 where nothing fits.
    """
    problem = read_problem(profile, cluster, batch_size, options, calibration)
    blocks = inner_blocks(problem.profile) if repeat is None else _blocks(repeat, len(problem.profile.blocks))
    wanted = _powers(problem.cluster.devices) if depths is None else _depths(depths, problem.cluster.devices)
    with progress_bar("planning") as on_progress:
        sizes = ask(problem, planner_named(NAME), blocks, wanted, on_progress)
    if as_json:
        repeated = {"start": blocks.start, "stop": blocks.stop}
        typer.echo(dump({"repeat": repeated, "sizes": sizes, "warnings": problem.warnings}))
    else:
        show_warnings(problem)
        _show(sizes, blocks)
    if not any(size.blocks for size in sizes):
        raise SystemExit(INFEASIBLE)


def _blocks(text: str, blocks: int) -> range:
    start, colon, stop = text.partition(":")
    try:
        found = range(blocks)[slice(int(start) if start else None, int(stop) if stop else None)]
    except ValueError as error:
        raise InvalidInputError("repeat", "must be start:stop, such as 1:-1", text) from error
    require(bool(colon) and len(found) > 0, "repeat", f"must be start:stop with some of the {blocks} blocks", text)
    return found


def _powers(devices: int) -> list[int]:
    return [2**power for power in range(devices.bit_length())]


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


def _show(sizes: Sequence[LargestSize], blocks: range) -> None:
    from planner_service.commands.tables import show_table
    from planner_service.dashboard.formats import size as readable

    rows = [
        (
            str(each.depth),
            each.schedule,
            "yes" if each.recompute else "no",
            f"{each.blocks:,}" if each.blocks else "none",
            f"{each.parameters / 1e6:,.4g}",
            readable(each.weight_bytes),
            each.limit,
        )
        for each in sizes
    ]
    typer.echo(f"blocks {blocks.start} to {blocks.stop - 1} repeated")
    headings = ("Stages", "Schedule", "Recompute", "Blocks", "Million parameters", "Weights", "What ends it")
    show_table(headings, rows)
