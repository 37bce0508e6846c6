"""`pipeplan demo`: the main job on this machine, and what it prints: candidates, the plan, predicted and measured."""

import dataclasses
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pipeplan.cli.console import INFEASIBLE, require_extra
from pipeplan.documents.files import answer_document
from pipeplan.documents.plan import Infeasible
from pipeplan.simulation.report import Compared, RunReport
from planner_service.demo.main_job import BATCH_SIZE, DemoCandidate, DemoOutcome, DemoProcess

MIB = 2**20


def show_candidates(console: Console, outcome: DemoOutcome) -> None:
    """What was measured, and every planner's answer, the chosen one marked."""
    _show_measured(console, outcome)
    table = Table(title=f"Candidates for batches of {BATCH_SIZE} samples", title_justify="left")
    for heading in ("planner", "schedule", "blocks by stage"):
        table.add_column(heading)
    for heading in ("replicas", "microbatches", "samples/s", "bubble", "memory"):
        table.add_column(heading, justify="right")
    for candidate in outcome.candidates:
        chosen = candidate is outcome.chosen
        table.add_row(*_candidate_row(candidate, chosen), style="bold green" if chosen else None)
    console.print(table)


def show_run(console: Console, outcome: DemoOutcome, url: str) -> None:
    """Predicted against measured, the loss, and where plan and run can be looked at."""
    if outcome.report is None or outcome.chosen is None:
        return
    _show_report(console, outcome.report)
    console.print(f"plan  {url}/plans/{outcome.chosen.plan_id}", soft_wrap=True)
    console.print(f"run   {url}/runs/{outcome.run_id}", soft_wrap=True)


def outcome_document(outcome: DemoOutcome, url: str) -> dict[str, Any]:
    """The same as one document."""
    chosen = outcome.chosen
    answers = [_candidate_document(candidate) for candidate in outcome.candidates]
    return {
        "url": url,
        "profile_id": outcome.profile_id,
        "cluster_id": outcome.cluster_id,
        "cluster": dataclasses.asdict(outcome.cluster),
        "candidates": answers,
        "feasible": chosen is not None,
        "plan_id": chosen.plan_id if chosen else None,
        "plan": answer_document(chosen.answer) if chosen else None,
        "run_id": outcome.run_id,
        "report": dataclasses.asdict(outcome.report) if outcome.report else None,
    }


def _candidate_document(candidate: DemoCandidate) -> dict[str, Any]:
    more = {"predicted_samples_per_s": candidate.throughput_samples_per_s, "solve_time_s": candidate.solve_time_s}
    return answer_document(candidate.answer) | more


def _show_measured(console: Console, outcome: DemoOutcome) -> None:
    level = outcome.cluster.levels[0]
    profile = outcome.profile
    device, devices = outcome.cluster.device, outcome.cluster.devices
    lines = (
        f"{profile.model.name}: {len(profile.blocks)} blocks, {profile.weight_bytes / MIB:.1f} MiB of weights",
        f"{devices} devices: {device.name}, {device.memory_bytes / MIB:,.0f} MiB each",
        f"link: {level.bandwidth_bytes_per_s / 1e9:.2f} GB/s after {level.latency_s * 1e6:.0f} µs",
    )
    console.print("\n".join(lines), highlight=False)


def _candidate_row(candidate: DemoCandidate, chosen: bool) -> tuple[str, ...]:
    plan, planner = candidate.answer, f"{'*' if chosen else ' '} {candidate.planner}"
    if isinstance(plan, Infeasible):
        return (planner, "does not fit", plan.reasons[0].detail if plan.reasons else "", *("",) * 5)
    simulated = plan.simulated
    memory_bytes = max(simulated.peak_memory_bytes) if simulated else max(s.memory_bytes for s in plan.stages)
    bubble = simulated.bubble_fraction if simulated else plan.bubble_fraction
    return (
        planner,
        plan.schedule,
        " ".join(f"{s.start}-{s.stop - 1}" for s in plan.stages) + (" recomputed" if plan.recompute else ""),
        "-".join(str(s.replicas) for s in plan.stages),
        f"{plan.microbatches} x {plan.microbatch_size}",
        f"{candidate.throughput_samples_per_s:.1f}",
        f"{bubble:.1%}",
        f"{memory_bytes / MIB:,.0f} MiB",
    )


def _show_report(console: Console, report: RunReport) -> None:
    title = f"Run: {report.schedule}, {report.steps} steps of {report.batch_size} samples in {report.elapsed_s:.0f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("predicted", "measured", "difference"):
        table.add_column(heading, justify="right")
    _compared_row(table, "throughput, samples/s", report.throughput_samples_per_s, 1.0)
    for stage in report.stages:
        _compared_row(table, f"stage {stage.stage}: busy, ms a step", stage.busy_s_per_batch, 1e3)
        _compared_row(table, f"stage {stage.stage}: peak memory, MiB", stage.peak_memory_bytes, 1 / MIB)
    console.print(table)
    console.print(f"loss  {report.losses[0]:.3f} first, {report.losses[-1]:.3f} last", highlight=False)


def _compared_row(table: Table, name: str, compared: Compared, scale: float) -> None:
    difference = f"{compared.error:+.1%}" if compared.predicted else ""
    table.add_row(name, f"{compared.predicted * scale:,.1f}", f"{compared.measured * scale:,.1f}", difference)


if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from planner_service.demo.main_job import DemoOutcome, OnProgress

POLL_S = 0.5
PIPED_WIDTH = 120


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep the service up at the end.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The service's port; 0: a free one.")] = 0,
    training_s: Annotated[float, typer.Option(min=0, help="Aim to train for so long; 30 to 120 steps.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Profiles a GPT-2 model on this machine, plans, trains it as the best plan says, and compares."""
    require_extra("service")
    require_extra("worker")
    from rich.console import Console

    from pipeplan.client.client import ServiceClient
    from planner_service.demo.main_job import agent, main_job, service

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    notes = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="pipeplan-demo-", ignore_cleanup_errors=True) as folder:  # noqa: SIM117
        with service(Path(folder), port) as (serving, url):
            with agent(Path(folder), url) as working, ServiceClient(url) as client, _bars(notes) as on_progress:
                outcome = main_job(client, working, on_progress, training_s=training_s)
            _show(outcome, url, as_json=as_json)
            if not keep:
                notes.print("the service ends now; with --keep it stays up, and these pages with it")
            else:
                notes.print(f"the service stays up at {url}; Ctrl-C ends it")
                _wait_for_interrupt(serving)
    if outcome.chosen is None:
        notes.print(f"no plan fits: {outcome.nearest_miss}", soft_wrap=True)
        raise SystemExit(INFEASIBLE)


def _show(outcome: "DemoOutcome", url: str, *, as_json: bool) -> None:
    from rich.console import Console

    from pipeplan.cli.plan_tables import picture
    from pipeplan.documents.files import dump
    # MOVED

    if as_json:
        typer.echo(dump(outcome_document(outcome, url)))
        return
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    show_candidates(console, outcome)
    plan = outcome.plan
    if plan is None:
        return
    if plan.simulated is not None:
        console.print("[bold]The chosen plan's first microbatches[/bold] (Forward, Backward, Recompute, Update)")
        console.print(picture(plan, plan.simulated), soft_wrap=True, markup=False, highlight=False)
    show_run(console, outcome, url)


@contextmanager
def _bars(console: "Console") -> Iterator["OnProgress"]:
    """A bar a phase on standard error; where that is no terminal, a line a phase."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[phase]:9}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def on_progress(phase: str, done: int, total: int, message: str) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(message, total=total, phase=phase)
                if not console.is_terminal:
                    console.print(f"{phase} ...")
            progress.update(bars[phase], completed=done, total=total, description=message)

        yield on_progress


def _wait_for_interrupt(serving: DemoProcess) -> None:
    """Returns at Ctrl-C. Raises PipeplanError if the service ends by itself."""
    try:
        while True:
            serving.require_running()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return
