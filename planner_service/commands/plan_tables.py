"""Plans in the terminal: one plan, a list, several side by side, and why there is none."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeplan.documents.files import plan_document
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Infeasible, Plan
from planner_service.contract.comparisons import Alternatives, Comparison
from planner_service.contract.listing import Page
from planner_service.contract.plans import PlanSummary
from planner_service.dashboard.formats import size

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
