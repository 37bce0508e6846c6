"""Watch: follows the ranks' status files while they run, and reports progress in one line."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from pipeplan.schedules.registry import schedule_named
from worker_agent.engine.processes import polling
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.status import UNKNOWN_BYTES, Status, read_status

_INTERVAL_S = 0.2

LATELY_S = 10.0
"""Rates cover this many of the last seconds."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run is: steps done of all, including those before a resumed checkpoint, and the newest one's loss.

    `samples_per_s` and `bubble_fraction` are of the last seconds; the latter is the share of the ranks' time without
    compute (None before a batch is measured). `peak_memory_bytes` is the largest peak of any rank (None: the peak of a
    rank is unknown), `memory_rank` that rank.
    """

    done: int
    steps: int
    loss: float
    samples_per_s: float | None
    bubble_fraction: float | None
    peak_memory_bytes: int | None
    memory_rank: int
    left_s: float | None


OnProgress = Callable[[RunProgress], None]


@dataclass(frozen=True, slots=True)
class _Look:
    """The measurements at one moment: the followed rank's batches, and all ranks' end and compute."""

    batches: int
    end_s: float
    spent_s: Mapping[int, tuple[float, float]]


class Watcher:
    """Makes progress reports from the ranks' statuses, look by look.

    The first worker of the last stage is followed: it has the loss.
    """

    def __init__(self, job: RunJob) -> None:
        # The last stage, or chunk 0 of the rank that has it as its last chunk.
        v_shaped = schedule_named(job.plan.schedule).v_shaped
        stage = 0 if v_shaped else job.plan.depth // job.plan.chunks - 1
        self.followed = next(r for r, worker in enumerate(job.plan.placement) if worker.stage == stage)
        self._job = job
        self._done = job.first_step
        self._looks = deque([_Look(0, 0.0, {})])

    def look(self, statuses: Mapping[int, Status]) -> RunProgress | None:
        """The progress, if there are more batches than at the last look."""
        followed = statuses.get(self.followed)
        if followed is None or followed.batches_done <= self._done or math.isnan(followed.loss):
            return None
        self._done = followed.batches_done

        spent_s = {rank: (s.end_s, s.busy_s) for rank, s in statuses.items() if s.measured_batches}
        self._looks.append(_Look(followed.measured_batches, followed.end_s, spent_s))
        while len(self._looks) > 2 and self._looks[-1].end_s - self._looks[1].end_s >= LATELY_S:
            self._looks.popleft()

        first, last = self._looks[0], self._looks[-1]
        rate = None
        if last.end_s > first.end_s:
            rate = (last.batches - first.batches) * self._job.plan.batch_size / (last.end_s - first.end_s)
        peaks_bytes = {rank: status.peak_memory_bytes for rank, status in statuses.items()}
        rank = max(peaks_bytes, key=lambda rank: (peaks_bytes[rank], -rank))
        left = (self._job.steps - self._done) * self._job.plan.batch_size
        return RunProgress(
            done=self._done,
            steps=self._job.steps,
            loss=followed.loss,
            samples_per_s=rate,
            bubble_fraction=self._bubble_fraction(),
            peak_memory_bytes=None if UNKNOWN_BYTES in peaks_bytes.values() else peaks_bytes[rank],
            memory_rank=rank,
            left_s=left / rate if rate else None,
        )

    def _bubble_fraction(self) -> float | None:
        """The share of the ranks' time without compute between the oldest and the newest look."""
        before, after = self._looks[0].spent_s, self._looks[-1].spent_s
        busy = []
        for rank, (end_s, busy_s) in after.items():
            end_before_s, busy_before_s = before.get(rank, (0.0, 0.0))
            if end_s > end_before_s:
                busy.append((busy_s - busy_before_s) / (end_s - end_before_s))
        return min(max(1.0 - fmean(busy), 0.0), 1.0) if busy else None


@contextmanager
def watching(job: RunJob, on_progress: OnProgress, here: Sequence[int]) -> Iterator[None]:
    """Calls `on_progress` whenever more batches are done.

    Only the node that has the followed rank reports, and only about its own ranks (`here`).
    """
    watcher = Watcher(job)
    if watcher.followed not in here:
        yield
        return

    def report() -> None:
        found = {rank: read_status(job.directory.status(rank)) for rank in here}
        progress = watcher.look({rank: status for rank, status in found.items() if status is not None})
        if progress is not None:
            on_progress(progress)

    try:
        with polling(report, _INTERVAL_S, name="watch"):
            yield
    finally:
        report()


def describe(progress: RunProgress) -> str:
    """`step 120 of 1000, loss 0.1234, 512 samples/s, bubble 12 %, memory 1.2 GiB (rank 0), 0:03:12 left`."""
    left = ""
    if progress.left_s is not None:
        minutes, seconds = divmod(round(progress.left_s), 60)
        hours, minutes = divmod(minutes, 60)
        left = f", {hours}:{minutes:02}:{seconds:02} left"
    return f"step {progress.done} of {progress.steps}, {describe_pace(progress)}{left}"


def describe_pace(progress: RunProgress) -> str:
    """The same without step and time: loss, samples a second, bubble, and memory, as far as they are known."""
    words = [f"loss {progress.loss:.4f}"]
    if progress.samples_per_s is not None:
        rate = progress.samples_per_s
        words.append(f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s")
    if progress.bubble_fraction is not None:
        words.append(f"bubble {100 * progress.bubble_fraction:.0f} %")
    if progress.peak_memory_bytes:
        words.append(f"memory {_bytes(progress.peak_memory_bytes)} (rank {progress.memory_rank})")
    return ", ".join(words)


def _bytes(value: float) -> str:
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:,.3g} {_UNITS[-1]}"
