"""Plan tables: plans in the terminal: one plan in full, a list, several side by side, and why there is none.

In full, as `pipeplan solve` shows it, a plan is its stages, its predictions, what else was considered, and a picture
of its first microbatches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from pipeplan.cli.console import plain_console, printable, table_of
from pipeplan.costs.memory import rank_bytes, rank_host_bytes
from pipeplan.documents.engines import OUR_RUNTIME
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Alternative, ClosedForm, Infeasible, Plan, Simulated
from pipeplan.formats import (
    four_digits,
    in_order,
    layout,
    memory_items,
    percent,
    proven,
    scheme,
    several,
    shared_weights,
    size,
    spelled_out,
    spoken_document,
    training,
)
from pipeplan.planners.auto.ranking import CLOSE
from pipeplan.planners.batches import one_pipeline
from pipeplan.programs.instructions import is_compute
from pipeplan.protocol.listing import Page
from pipeplan.protocol.plans import Alternatives, Comparison, PlanSummary
from pipeplan.simulation.draw import draw

CONFIGURATION = ("Stages", "Replicas", "Microbatches", "Recompute")
SHOWN_ALTERNATIVES = 10

COLUMNS = 110
"""The width of the picture."""

STEADY_EVENTS = 8
"""How far the picture continues after the pipeline has been filled."""


def show_solution(plan: Plan) -> None:
    """All of a plan, on standard output."""
    show_plan(plan)
    console = plain_console()
    simulated = plan.simulated
    if simulated is not None:
        played = simulated.extrapolated_from
        shorter = "" if played is None else f" of {played} microbatches, extrapolated"
        most = size(max(simulated.peak_memory_bytes))
        console.print(f"played over {simulated.batches} batches{shorter}: at most {most} on a worker")
    if plan.certificate is not None:
        console.print(proven(plan.certificate), soft_wrap=True)
    if plan.calibration_id is not None:
        console.print(f"costs corrected by calibration {plan.calibration_id}")
    if plan.split_backward:
        variant = ", its second part half-way through a batch and at the end" if plan.split_backward_half_way else ""
        console.print(f"the backward is split in two (2BP){variant}")
    if plan.tied:
        console.print(f"stages that share weights, and sum their gradients before each update: {shared_weights(plan)}")
    console.print(f"{plan.optimal_in_flight} in flight, {plan.configurations_considered:,} configurations considered")

    if any(stage.memory is not None for stage in plan.stages):
        items = memory_items(plan)
        held = [(str(stage), *(size(item_bytes[stage]) for _, item_bytes in items)) for stage in range(plan.depth)]
        console.print(table_of(("Memory", *(name for name, _ in items)), held))
    if len(plan.pareto) > 1:
        headings = ("Pareto front", *CONFIGURATION, "Samples/s", "Memory", "")
        front = [
            (*_configuration(each), _rate_of(each), size(each.memory_bytes), spelled_out(each.reason))
            for each in plan.pareto
        ]
        console.print(table_of(headings, front))
    if plan.alternatives:
        shown = list(dict.fromkeys(plan.alternatives))[:SHOWN_ALTERNATIVES]
        others = [(*_configuration(other), _rate_of(other), spelled_out(other.reason)) for other in shown]
        console.print(table_of(("Considered", *CONFIGURATION, "Samples/s", "Why not"), others))
    if simulated is not None:
        console.print(picture(plan, simulated), soft_wrap=True)


def picture(plan: Plan, simulated: Simulated) -> str:
    """The schedule's start: the pipeline is filled, and a few microbatches more."""
    played = replace(plan, microbatches=simulated.extrapolated_from or plan.microbatches)
    timeline = one_pipeline(played, batches=simulated.batches)
    ends_s = [event.end_s for event in timeline.lanes[0].events() if is_compute(event.instruction)]
    last = min(plan.optimal_in_flight + STEADY_EVENTS, len(ends_s)) - 1
    return draw(timeline, columns=COLUMNS, until_s=ends_s[last])


def show_plan(plan: Plan) -> None:
    """One plan and its stages."""
    console = plain_console()
    console.print(f"plan {content_id(plan)}  {plan.planner}, {plan.schedule}")
    closed_form = f"{_figures(plan.closed_form)} ({plan.cost_model})"
    if plan.simulated is None:
        line = f"closed form only: {closed_form}{_mark(plan)}"
    else:
        line = f"{_figures(plan.simulated)}{_mark(plan)}; closed form: {closed_form}"
    console.print(line, soft_wrap=True)
    microbatches = "1 microbatch" if plan.microbatches == 1 else f"{plan.microbatches} microbatches"
    console.print(f"{several(plan.workers, 'worker')}, {microbatches} of {plan.microbatch_size}")
    console.print(training(plan), soft_wrap=True)
    if plan.basis is not None:
        console.print(f"seconds: {plan.basis}", soft_wrap=True)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    if plan.engine != OUR_RUNTIME:
        shown = ((name, each) for name, each in plan.degrees.items() if name != "expert_tensor" or plan.form.expert > 1)
        degrees = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown)
        states = f"sharding {plan.sharding}" + f" in each of {plan.replicate} groups" * (plan.replicate > 1)
        states += ", graphs" * bool(plan.graphs) + ", all-to-all overlapped" * plan.a2a_overlap
        console.print(f"for {plan.engine} with {plan.optimizer}: {degrees}, {states}", soft_wrap=True)
        console.print(f"ranks: {layout(plan)}", soft_wrap=True)
    if plan.offload != "none":
        part = f" of {plan.offload_share:.0%} of the layers" * (plan.offload_share < 1)
        console.print(f"offload {plan.offload}{part}: {size(max(rank_host_bytes(plan)))} of the host's memory a worker")
    for each in plan.choices:
        played = each.throughput_samples_per_s
        if played is not None and played > (plan.throughput_samples_per_s or inf) * (1 + CLOSE):
            rate = f"{four_digits(played)} samples/s"
            console.print(f"with {each.degree.replace('_', ' ')} {each.instead}: {rate}, {each.reason}", soft_wrap=True)
    headings = ("Stage", "Blocks", "Replicas", "Recompute", "Time a microbatch", "Memory a worker")
    console.print(table_of(headings, list(stage_rows(plan))))


def show_choices(plan: Plan) -> None:
    """Why each degree has its value: what other values would give."""
    rows = [
        (
            each.degree.replace("_", " "),
            each.value,
            each.instead,
            "" if each.throughput_samples_per_s is None else four_digits(each.throughput_samples_per_s),
            spelled_out(each.reason),
        )
        for each in in_order(plan.choices)
    ]
    plain_console().print(table_of(("Degree", "Chosen", "Instead", "Samples/s", ""), rows))


def stage_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """One row for each stage; equal neighbouring stages share a row."""
    together: list[tuple[tuple[str, ...], list[int]]] = []
    for index, stage in enumerate(plan.stages):
        about = (
            f"{stage.stop - stage.start} each",
            str(stage.replicas),
            stage.recomputes,
            f"{1e3 * stage.time_s:.4g} ms",
            size(stage.memory_bytes),
        )
        if together and together[-1][0] == about:
            together[-1][1].append(index)
        else:
            together.append((about, [index]))
    for (each, *others), indices in together:
        first, last = indices[0], indices[-1]
        start, end = plan.stages[first].start, plan.stages[last].stop - 1
        blocks = f"{start}-{end}" if end > start else f"{start}"
        if first == last:
            yield str(first), blocks, *others
        else:
            yield f"{first}-{last}", f"{blocks}, {each}", *others


def show_list(page: Page[PlanSummary]) -> None:
    """Plans, newest first, one row each."""
    console = plain_console()
    if not page.items:
        console.print("no plans yet: `pipeplan plan create` makes one")
        return
    shape = ("Plan", "Model", "Devices", "Planner", "Schedule", "Stages x replicas", "Batch")
    headings = (*shape, "Samples/s", "Closed form", "Bubble")
    rows = [
        (
            plan.id,
            plan.model,
            plan.device_types,
            plan.planner,
            plan.schedule,
            f"{plan.depth} x {plan.width or 'mixed'}",
            str(plan.batch_size),
            *_rates(plan.throughput_samples_per_s, plan.closed_form_samples_per_s, _mark(plan)),
            percent(plan.bubble_fraction),
        )
        for plan in page.items
    ]
    console.print(table_of(headings, rows))
    if page.next_cursor:
        console.print(f"more: --cursor {page.next_cursor}")


def show_comparison(plans: Sequence[Plan]) -> None:
    """One row for each plan, compared with the first."""
    shape = ("Plan", "Planner", "Schedule", "Stages x replicas", "Microbatches")
    headings = (*shape, "Most memory", "Bubble", "Samples/s", "Closed form", "")
    rows = [
        (
            content_id(plan)[:10],
            plan.planner,
            plan.schedule,
            f"{plan.depth} x {plan.width or 'mixed'}",
            f"{plan.microbatches} x {plan.microbatch_size}",
            size(max(rank_bytes(plan))),
            percent(plan.bubble_fraction),
            *_rates(plan.throughput_samples_per_s, plan.closed_form.throughput_samples_per_s, _mark(plan)),
            "" if (speed := _speed(plan, plans[0])) is None else f"{speed:.2f}x",
        )
        for plan in plans
    ]
    plain_console().print(table_of(headings, rows))


def comparison_document(plans: Sequence[Plan]) -> dict[str, Any]:
    """The same for scripts: the plans' documents, each plan's speed relative to the first, and the fastest.

    Speeds are played ones, None if one of the two was not played. If no plan was played, the fastest is that of the
    closed forms.
    """
    fastest = max(plans, key=lambda p: (p.throughput_samples_per_s or 0.0, p.closed_form.throughput_samples_per_s))
    return {
        "plans": [spoken_document(plan) | {"speed_against_first": _speed(plan, plans[0])} for plan in plans],
        "fastest": content_id(fastest),
    }


def show_reasons_of_speed(comparison: Comparison) -> None:
    """One line for each factor of every plan but the first, and for each reason why the plans are not comparable."""
    console = plain_console()
    for speed in comparison.speeds[1:]:
        ratio = "" if speed.ratio is None else f" {speed.ratio:.2f}x"
        console.print(f"{speed.id[:10]}{ratio}" + ("" if speed.because else ": nothing in it differs"))
        for factor in speed.because:
            console.print(f"  {factor.ratio:.2f}x {factor.name}: {factor.text}")
    for caveat in comparison.caveats:
        console.print(f"note: {printable(caveat)}")


def show_alternatives(found: Alternatives) -> None:
    """One row for each configuration that was considered and lost."""
    console = plain_console()
    console.print(f"{found.configurations_considered:,} configurations considered")
    headings = ("Schedule", "Stages x replicas", "Microbatches", "Recompute", "Samples/s", "Memory", "Why it lost")
    rows = [
        (
            scheme(other),
            f"{other.depth} x {other.width or 'mixed'}",
            f"{other.microbatches} x {other.microbatch_size}",
            "yes" if other.recompute else "no",
            _rate_of(other),
            "" if other.memory_bytes is None else size(other.memory_bytes),
            spelled_out(other.reason),
        )
        for other in found.alternatives
    ]
    console.print(table_of(headings, rows))


def show_reasons(answer: Infeasible) -> None:
    """Why no plan fits, on standard error."""
    console = plain_console(on_error_stream=True)
    console.print(f"no feasible plan: {answer.configurations_considered:,} configurations considered")
    for reason in answer.reasons:
        where = "" if reason.stage is None else f" (nearest miss: stage {reason.stage}"
        by = "" if reason.missing_bytes is None else f", {reason.missing_bytes:,} bytes over"
        console.print(f"  {reason.rule}: {reason.detail}{where}{by}{')' if where else ''}")


def _mark(plan: Plan | PlanSummary) -> str:
    return " (estimated)" if plan.estimated else ""


def _figures(of: Simulated | ClosedForm) -> str:
    return f"{four_digits(of.throughput_samples_per_s)} samples/s, bubble {percent(of.bubble_fraction)}"


def _rates(played: float | None, closed_form: float, mark: str) -> tuple[str, str]:
    """The cells under Samples/s and Closed form."""
    form = four_digits(closed_form)
    return ("closed form only", form + mark) if played is None else (f"{four_digits(played)}{mark}", form)


def _rate_of(other: Alternative) -> str:
    """The alternative's cell under Samples/s."""
    if other.throughput_samples_per_s is not None:
        return four_digits(other.throughput_samples_per_s)
    form = other.closed_form_samples_per_s
    return "" if form is None else f"{four_digits(form)} in closed form"


def _speed(plan: Plan, first: Plan) -> float | None:
    """How many times as fast as the first, both played."""
    rate, first_rate = plan.throughput_samples_per_s, first.throughput_samples_per_s
    return rate / first_rate if rate is not None and first_rate else None


def _configuration(other: Alternative) -> tuple[str, ...]:
    """The schedule, and the cells under the headings of CONFIGURATION."""
    if other.depth == 0:
        microbatches = f"{other.microbatches} x {other.microbatch_size}" if other.microbatches else "–"
        return (other.schedule, "–", "–", microbatches, "–")
    return (
        scheme(other),
        str(other.depth),
        str(other.width or "mixed"),
        f"{other.microbatches} x {other.microbatch_size}",
        "yes" if other.recompute else "no",
    )
