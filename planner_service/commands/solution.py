"""A plan as `pipeplan solve` shows it: stages, predictions, what else was considered, and its first microbatches."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from planner_service.commands.plan_tables import show_plan
from planner_service.core.draw import draw
from planner_service.core.plan import Alternative, Plan, Simulated
from planner_service.core.planner.play import one_pipeline
from planner_service.core.schedule.instructions import is_compute
from planner_service.dashboard.formats import size

SHOWN_ALTERNATIVES = 10
COLUMNS = 110
STEADY_EVENTS = 8
"""How far the picture goes after the pipeline has been filled."""


def show_solution(plan: Plan) -> None:
    """All of it, on standard output."""
    show_plan(plan)
    console = Console(markup=False, highlight=False)
    if plan.simulated is not None:
        console.print(_simulated(plan.simulated))
    console.print(f"{plan.optimal_in_flight} in flight, {plan.configurations_considered} configurations considered")
    if plan.alternatives:
        console.print(_alternatives(plan.alternatives))
    if plan.simulated is not None:
        console.print(picture(plan, plan.simulated), soft_wrap=True)


def picture(plan: Plan, simulated: Simulated) -> str:
    """The schedule's start: the pipeline is filled, and a few microbatches more."""
    timeline = one_pipeline(plan, batches=simulated.batches)
    ends_s = [event.end_s for event in timeline.lanes[0].events() if is_compute(event.instruction)]
    last = min(plan.optimal_in_flight + STEADY_EVENTS, len(ends_s)) - 1
    return draw(timeline, columns=COLUMNS, until_s=ends_s[last])


def _simulated(simulated: Simulated) -> str:
    return (
        f"simulated over {simulated.batches} batches: {simulated.throughput_samples_per_s:,.4g} samples/s, "
        f"bubble {100 * simulated.bubble_fraction:.1f} %, at most {size(max(simulated.peak_memory_bytes))}"
    )


def _alternatives(alternatives: Sequence[Alternative]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    headings = ("Considered", "Stages", "Replicas", "Microbatches", "Recompute", "Why not")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for other in alternatives[:SHOWN_ALTERNATIVES]:
        table.add_row(
            other.schedule,
            str(other.depth),
            str(other.width or "mixed"),
            f"{other.microbatches} x {other.microbatch_size}",
            "yes" if other.recompute else "no",
            other.reason,
        )
    return table
