"""`pipeplan demo`: the main job on this machine, through a service and an agent that it starts and ends."""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeplan.cli.console import INFEASIBLE, progress_lines, require_extra

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from planner_service.demo.main_job import OnProgress

POLL_S = 0.5
"""Seconds between two checks whether a kept service still runs."""

PIPED_WIDTH = 120
"""Columns of a table if standard output is not a terminal."""


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep the service up at the end.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The service's port; 0: a free one.")] = 0,
    training_s: Annotated[float, typer.Option(min=0, help="Seconds to train, about; 30 to 120 steps.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Profiles, plans and trains a GPT-2 model on this machine.

    It compares what was predicted with what was measured.
    """
    require_extra("service", "worker")
    from rich.console import Console

    from pipeplan.client.client import Client
    from pipeplan.documents.files import dump
    from planner_service.demo.main_job import agent, main_job, service
    from planner_service.demo.show import outcome_document, show_candidates, show_run

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    notes = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="pipeplan-demo-", ignore_cleanup_errors=True) as folder:  # noqa: SIM117
        with service(Path(folder), port) as (serving, url):
            with agent(Path(folder), url) as working, Client(url) as client, _bars(notes) as on_progress:
                outcome = main_job(client, working, on_progress, training_s=training_s)
            if as_json:
                typer.echo(dump(outcome_document(outcome, url)))
            else:
                console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
                show_candidates(console, outcome)
                show_run(console, outcome, url)
            if not keep:
                notes.print("the service ends now; with --keep it stays up, and these pages with it")
            else:
                notes.print(f"the service stays up at {url}; Ctrl-C ends it")
                with suppress(KeyboardInterrupt):
                    while True:
                        serving.require_running()
                        time.sleep(POLL_S)
    if outcome.chosen is None:
        notes.print(f"no plan fits: {outcome.nearest_miss}", soft_wrap=True)
        raise SystemExit(INFEASIBLE)


@contextmanager
def _bars(console: "Console") -> Iterator["OnProgress"]:
    """A bar for each phase on standard error, or lines if that is not a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[phase]:9}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    if not console.is_terminal:
        begun: set[str] = set()

        def on_line(phase: str, done: int, total: int, message: str) -> None:
            if phase not in begun:
                begun.add(phase)
                console.print(f"{phase} ...")
            say(f"{phase}: {done} of {total}, now {message}")

        with progress_lines() as say:
            yield on_line
        return
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}

        def on_progress(phase: str, done: int, total: int, message: str) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(message, total=total, phase=phase)
            progress.update(bars[phase], completed=done, total=total, description=message)

        yield on_progress
