"""Progress of a run on standard error: one line that is redrawn on a terminal, now and then a new one elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from worker_agent.runtime.job import RunJob
    from worker_agent.runtime.watch import OnProgress, RunProgress

EVERY_S = 5.0
"""Without a terminal, so much time passes between two lines."""

ROOM_FOR_A_BAR = 150
"""Columns of a terminal; on narrower ones the words have it all, two lines if need be."""


@contextmanager
def shown(job: "RunJob", *, quiet: bool) -> Iterator["OnProgress"]:
    """What a run is to call with its progress. Quiet, nothing is shown."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with redrawn(job, console) as on_progress:
            yield on_progress
    else:
        yield Lines(lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False), time.monotonic)


@contextmanager
def redrawn(job: "RunJob", console: "Console") -> Iterator["OnProgress"]:
    """The same on a terminal: one place that is written again and again, and is empty in the end."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    from worker_agent.runtime.progress_line import describe

    words = TextColumn("{task.description}", table_column=Column(no_wrap=False, overflow="fold"), markup=False)
    bars = [BarColumn()] if console.width >= ROOM_FOR_A_BAR else []
    with Progress(words, *bars, console=console, transient=True) as progress:
        bar = progress.add_task(f"starting {job.plan.workers} ranks", total=job.steps, completed=job.first_step)
        yield lambda now: progress.update(bar, completed=now.done, description=describe(now))


class Lines:
    """A line `EVERY_S` after the first progress and from then on, and one at the end: logs stay short."""

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._write = write
        self._clock = clock
        self._told_s: float | None = None

    def __call__(self, progress: "RunProgress") -> None:
        from worker_agent.runtime.progress_line import describe

        now_s = self._clock()
        if self._told_s is None:
            self._told_s = now_s
        if now_s - self._told_s >= EVERY_S or progress.done == progress.steps:
            self._told_s = now_s
            self._write(describe(progress))
