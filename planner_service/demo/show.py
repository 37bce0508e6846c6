"""Show: the demo's output: candidates, the chosen plan, predicted against measured."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeplan.cli.plan_tables import picture
from pipeplan.documents.plan import Infeasible
from pipeplan.formats import change, percent, seconds, spoken_document, why_missed
from pipeplan.simulation.report import Compared
from planner_service.demo.main_job import DemoOutcome

MIB = 2**20


def show_candidates(console: Console, outcome: DemoOutcome) -> None:
    """The measurements, every planner's answer with the chosen one marked, and a picture of the chosen plan."""
    profile, cluster = outcome.profile, outcome.cluster
    level = cluster.levels[0]
    lines = (
        f"{profile.model.name}: {len(profile.blocks)} blocks, {profile.weight_bytes / MIB:.1f} MiB of weights",
        f"{cluster.devices} devices: {cluster.device.name}, {cluster.device.memory_bytes / MIB:,.0f} MiB each",
        f"link: {level.bandwidth_bytes_per_s / 1e9:.2f} GB/s after {level.latency_s * 1e6:.0f} µs",
    )
    console.print("\n".join(lines), highlight=False)

    table = Table(title=f"Candidates for batches of {outcome.batch_size} samples", title_justify="left")
    for heading in ("planner", "schedule", "blocks by stage"):
        table.add_column(heading)
    for heading in ("replicas", "microbatches", "samples/s", "bubble", "memory"):
        table.add_column(heading, justify="right")
    for candidate in outcome.candidates:
        plan, chosen = candidate.answer, candidate is outcome.chosen
        planner = f"{'*' if chosen else ' '} {candidate.planner}"
        if isinstance(plan, Infeasible):
            table.add_row(planner, "does not fit", plan.reasons[0].detail if plan.reasons else "", *("",) * 5)
            continue
        simulated = plan.simulated
        memory_bytes = max(simulated.peak_memory_bytes) if simulated else max(s.memory_bytes for s in plan.stages)
        table.add_row(
            planner,
            plan.schedule,
            " ".join(f"{s.start}-{s.stop - 1}" for s in plan.stages) + (" recomputed" if plan.recompute else ""),
            "-".join(str(s.replicas) for s in plan.stages),
            f"{plan.microbatches} x {plan.microbatch_size}",
            f"{candidate.throughput_samples_per_s:.1f}",
            "" if plan.bubble_fraction is None else percent(plan.bubble_fraction),
            f"{memory_bytes / MIB:,.0f} MiB",
            style="bold green" if chosen else None,
        )
    console.print(table)

    best = outcome.plan
    if best is not None and best.simulated is not None:
        console.print("[bold]The chosen plan's first microbatches[/bold] (Forward, Backward, Recompute, Update)")
        console.print(picture(best, best.simulated), soft_wrap=True, markup=False, highlight=False)


def show_run(console: Console, outcome: DemoOutcome, url: str) -> None:
    """Predicted against measured, the loss, and the pages of plan and run."""
    report = outcome.report
    if report is None or outcome.chosen is None:
        return
    title = f"Run: {report.schedule}, {report.steps} steps of {report.batch_size} samples in {report.elapsed_s:.0f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("predicted", "measured", "difference"):
        table.add_column(heading, justify="right")
    _compared_row(table, "throughput, samples/s", report.throughput_samples_per_s, 1.0)
    again = report.repredicted
    if again is not None:
        name = f"the same, from its first {seconds(again.elapsed_s)}"
        _compared_row(table, name, again.throughput_samples_per_s, 1.0)
    for stage in report.stages:
        _compared_row(table, f"stage {stage.stage}: busy, ms a step", stage.busy_s_per_batch, 1e3)
        if stage.peak_memory_bytes is not None:
            _compared_row(table, f"stage {stage.stage}: peak memory, MiB", stage.peak_memory_bytes, 1 / MIB)
    console.print(table)
    if report.missed is not None:
        sentence = why_missed(report.throughput_samples_per_s, report.missed, report.ranks)
        console.print(sentence, soft_wrap=True, highlight=False)
    console.print(f"loss  {report.losses[0]:.3f} first, {report.losses[-1]:.3f} last", highlight=False)
    console.print(f"plan  {url}/plans/{outcome.chosen.plan_id}", soft_wrap=True)
    console.print(f"run   {url}/runs/{outcome.run_id}", soft_wrap=True)


def outcome_document(outcome: DemoOutcome, url: str) -> dict[str, Any]:
    """Everything that the demo found out, as one document."""
    chosen = outcome.chosen
    answers = [
        spoken_document(candidate.answer)
        | {"predicted_samples_per_s": candidate.throughput_samples_per_s, "solve_time_s": candidate.solve_time_s}
        for candidate in outcome.candidates
    ]
    return {
        "url": url,
        "profile_id": outcome.profile_id,
        "cluster_id": outcome.cluster_id,
        "cluster": dataclasses.asdict(outcome.cluster),
        "candidates": answers,
        "feasible": chosen is not None,
        "plan_id": chosen.plan_id if chosen else None,
        "plan": spoken_document(chosen.answer) if chosen else None,
        "run_id": outcome.run_id,
        "report": dataclasses.asdict(outcome.report) if outcome.report else None,
    }


def _compared_row(table: Table, name: str, compared: Compared, scale: float) -> None:
    difference = change(compared.error) if compared.predicted else ""
    table.add_row(name, f"{compared.predicted * scale:,.1f}", f"{compared.measured * scale:,.1f}", difference)
