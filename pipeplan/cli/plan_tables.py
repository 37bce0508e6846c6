"""Plans in the terminal: one plan, a list, several side by side, and why there is none.

A plan as `pipeplan solve` shows it: stages, predictions, what else was considered, and its first microbatches.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeplan.documents.files import plan_document
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Alternative, Infeasible, Plan, Simulated
from pipeplan.formats import memory_items, proven, size
from pipeplan.planners.complete import one_pipeline
from pipeplan.programs.instructions import is_compute
from pipeplan.protocol.listing import Page
from pipeplan.protocol.plans import Alternatives, Comparison, PlanSummary
from pipeplan.simulation.draw import draw

PIPED_WIDTH = 200


def show_plan(plan: Plan) -> None:
    """One plan and its stages."""
    console = _console()
    console.print(f"plan {content_id(plan)}  {plan.planner}, {plan.schedule}")
    console.print(
        f"{plan.throughput_samples_per_s:,.4g} samples/s{_mark(plan)}, bubble {100 * plan.bubble_fraction:.1f} %, "
        f"{plan.workers} workers, {plan.microbatches} microbatches of {plan.microbatch_size}",
        highlight=False,
    )
    for warning in plan.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    table = _table("Stage", "Blocks", "Replicas", "Recompute", "Time a microbatch", "Memory a worker")
    for index, stage in enumerate(plan.stages):
        table.add_row(
            str(index),
            f"{stage.start}-{stage.stop - 1}",
            str(stage.replicas),
            "yes" if stage.recompute else "no",
            f"{1e3 * stage.time_s:.4g} ms",
            size(stage.memory_bytes),
        )
    console.print(table)


def show_list(page: Page[PlanSummary]) -> None:
    """Plans, newest first, a row each."""
    if not page.items:
        _console().print("no plans yet: `pipeplan plan create` makes one")
        return
    table = _table("Plan", "Model", "Planner", "Schedule", "Stages x replicas", "Batch", "Samples/s", "Bubble")
    for plan in page.items:
        table.add_row(
            plan.id,
            plan.model,
            plan.planner,
            plan.schedule,
            f"{plan.depth} x {plan.width or 'mixed'}",
            str(plan.batch_size),
            f"{plan.throughput_samples_per_s:,.4g}{_mark(plan)}",
            f"{100 * plan.bubble_fraction:.1f} %",
        )
    _console().print(table)
    if page.next_cursor:
        _console().print(f"more: --cursor {page.next_cursor}")


def show_comparison(plans: Sequence[Plan]) -> None:
    """A row a plan, against the first."""
    headings = (
        "Plan",
        "Planner",
        "Schedule",
        "Stages x replicas",
        "Microbatches",
        "Most memory",
        "Bubble",
        "Samples/s",
        "",
    )
    table = _table(*headings)
    for plan in plans:
        table.add_row(
            content_id(plan)[:10],
            plan.planner,
            plan.schedule,
            f"{plan.depth} x {plan.width or 'mixed'}",
            f"{plan.microbatches} x {plan.microbatch_size}",
            size(_most_memory_bytes(plan)),
            f"{100 * plan.bubble_fraction:.1f} %",
            f"{plan.throughput_samples_per_s:,.4g}{_mark(plan)}",
            f"{_speed(plan, plans[0]):.2f}x",
        )
    _console().print(table)


def comparison_document(plans: Sequence[Plan]) -> dict[str, Any]:
    """The same for scripts: the plans' documents, the speed of each against the first, and the fastest."""
    fastest = max(plans, key=lambda plan: plan.throughput_samples_per_s)
    return {
        "plans": [plan_document(plan) | {"speed_against_first": _speed(plan, plans[0])} for plan in plans],
        "fastest": content_id(fastest),
    }


def show_reasons_of_speed(comparison: Comparison) -> None:
    """A line a factor, of every plan but the first."""
    console = _console()
    for speed in comparison.speeds[1:]:
        ratio = "" if speed.ratio is None else f" {speed.ratio:.2f}x"
        console.print(f"{speed.id[:10]}{ratio}" + ("" if speed.because else ": nothing in it differs"))
        for factor in speed.because:
            console.print(f"  {factor.ratio:.2f}x {factor.name}: {factor.text}")


def show_alternatives(found: Alternatives) -> None:
    """A row a configuration that was considered and lost."""
    console = _console()
    console.print(f"{found.configurations_considered:,} configurations considered")
    table = _table("Schedule", "Stages x replicas", "Microbatches", "Recompute", "Samples/s", "Memory", "Why it lost")
    for other in found.alternatives:
        rate, memory_bytes = other.throughput_samples_per_s, other.memory_bytes
        table.add_row(
            other.schedule,
            f"{other.depth} x {other.width or 'mixed'}",
            f"{other.microbatches} x {other.microbatch_size}",
            "yes" if other.recompute else "no",
            "" if rate is None else f"{rate:,.4g}",
            "" if memory_bytes is None else size(memory_bytes),
            other.reason,
        )
    console.print(table)


def show_reasons(answer: Infeasible) -> None:
    """Why no plan fits, on standard error."""
    console = _console(on_error_stream=True)
    console.print(f"no feasible plan: {answer.configurations_considered} configurations considered")
    for reason in answer.reasons:
        where = "" if reason.stage is None else f" (nearest miss: stage {reason.stage}"
        by = "" if reason.missing_bytes is None else f", {reason.missing_bytes:,} bytes over"
        console.print(f"  {reason.rule}: {reason.detail}{where}{by}{')' if where else ''}")


def _mark(plan: Plan | PlanSummary) -> str:
    return " (estimated)" if plan.estimated else ""


def _most_memory_bytes(plan: Plan) -> int:
    return max(stage.memory_bytes for stage in plan.stages)


def _speed(plan: Plan, first: Plan) -> float:
    rate = first.throughput_samples_per_s
    return plan.throughput_samples_per_s / rate if rate else 0.0


def _console(*, on_error_stream: bool = False) -> Console:
    """A console that prints names as they are: brackets in them are not markup."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(stderr=on_error_stream, markup=False, highlight=False, width=width)


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == "Plan")
    return table


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
