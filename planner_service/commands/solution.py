"""A plan as `pipeplan solve` shows it: stages, predictions, what else was considered, and its first microbatches."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from pipeplan.documents.plan import Alternative, Plan, Simulated
from pipeplan.planners.complete import one_pipeline
from pipeplan.programs.instructions import is_compute
from pipeplan.simulation.draw import draw
from planner_service.commands.plan_tables import PIPED_WIDTH, show_plan
from planner_service.dashboard.formats import memory_items, proven, size

SHOWN_ALTERNATIVES = 10
COLUMNS = 110
STEADY_EVENTS = 8
"""How far the picture goes after the pipeline has been filled."""


def show_solution(plan: Plan) -> None:
    """All of it, on standard output."""
    show_plan(plan)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    if plan.simulated is not None:
        console.print(_simulated(plan.simulated))
    if plan.certificate is not None:
        console.print(proven(plan.certificate), soft_wrap=True)
    if plan.calibration_id is not None:
        console.print(f"costs corrected by calibration {plan.calibration_id}")
    if plan.split_backward:
        variant = ", its second part half-way through a batch and at the end" if plan.split_backward_half_way else ""
        console.print(f"the backward is split in two (2BP){variant}")
    console.print(f"{plan.optimal_in_flight} in flight, {plan.configurations_considered} configurations considered")
    if any(stage.memory is not None for stage in plan.stages):
        console.print(_memory(plan))
    if len(plan.pareto) > 1:
        console.print(_front(plan.pareto))
    if plan.alternatives:
        console.print(_alternatives(plan.alternatives))
    if plan.simulated is not None:
        console.print(picture(plan, plan.simulated), soft_wrap=True)


def picture(plan: Plan, simulated: Simulated) -> str:
    """The schedule's start: the pipeline is filled, and a few microbatches more."""
    played = replace(plan, microbatches=simulated.extrapolated_from or plan.microbatches)
    timeline = one_pipeline(played, batches=simulated.batches)
    ends_s = [event.end_s for event in timeline.lanes[0].events() if is_compute(event.instruction)]
    last = min(plan.optimal_in_flight + STEADY_EVENTS, len(ends_s)) - 1
    return draw(timeline, columns=COLUMNS, until_s=ends_s[last])


def _simulated(simulated: Simulated) -> str:
    shorter = (
        "" if simulated.extrapolated_from is None else f" of {simulated.extrapolated_from} microbatches, extrapolated"
    )
    return (
        f"simulated over {simulated.batches} batches{shorter}: {simulated.throughput_samples_per_s:,.4g} samples/s, "
        f"bubble {100 * simulated.bubble_fraction:.1f} %, at most {size(max(simulated.peak_memory_bytes))}"
    )


def _memory(plan: Plan) -> Table:
    """What a worker of each stage holds, by what it is; what no stage holds is left out."""
    items = memory_items(plan)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("Memory", *(name for name, _ in items)):
        table.add_column(heading, overflow="fold")
    for stage in range(plan.depth):
        table.add_row(str(stage), *(size(held[stage]) for _, held in items))
    return table


def _front(front: Sequence[Alternative]) -> Table:
    """What no other plan beats in both throughput and memory."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("Pareto front", "Stages", "Replicas", "Microbatches", "Recompute", "Samples/s", "Memory", ""):
        table.add_column(heading, overflow="fold")
    for each in front:
        rate = f"{each.throughput_samples_per_s or 0.0:,.4g}"
        table.add_row(*_configuration(each), rate, size(each.memory_bytes), each.reason)
    return table


def _configuration(other: Alternative) -> tuple[str, ...]:
    if other.depth == 0:
        return (other.schedule, *("–",) * 4)
    return (
        other.schedule,
        str(other.depth),
        str(other.width or "mixed"),
        f"{other.microbatches} x {other.microbatch_size}",
        "yes" if other.recompute else "no",
    )


def _alternatives(alternatives: Sequence[Alternative]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    headings = ("Considered", "Stages", "Replicas", "Microbatches", "Recompute", "Why not")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for other in alternatives[:SHOWN_ALTERNATIVES]:
        table.add_row(*_configuration(other), other.reason)
    return table
