"""Measured: the figures of each batch on a rank, and the measurements of all ranks of a run, put together.

A rank writes a row a batch to a file: the file grows with the run, the rank's memory does not.
"""

import csv
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.calibration.beginning import beginning
from pipeplan.programs.instructions import BackwardInput, BackwardWeight, Update
from pipeplan.programs.timeline import Lane, LaneSummary, Summary, Timeline
from pipeplan.simulation.report import RankReport
from worker_agent.engine.cores import shares_of_others
from worker_agent.engine.processes import polling
from worker_agent.engine.results import RankResult
from worker_agent.runtime.job import STEPS, RunJob
from worker_agent.runtime.recorder import Spent
from worker_agent.runtime.status import UNKNOWN_BYTES, StatusWriter

_log = logging.getLogger(__name__)

_ROW = np.dtype([("end_s", "<f8"), ("busy_s", "<f8"), ("loss", "<f8"), ("memory_bytes", "<i8")])

Rows = NDArray[np.void]
"""A row a batch: its end since the run's start, seconds of compute in it, its loss (NaN where the rank does
not compute it), and its peak bytes (or UNKNOWN_BYTES)."""


PARTS, BATCHES_A_PART = 8, 3
"""The parts of a run that are compared with each other, and the number of batches that each must have."""


class BatchLog:
    """Writes a rank's rows, and reports their sums to its status."""

    def __init__(self, path: Path, status: StatusWriter, first_batch: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)  # a rank that is killed has written its measurements
        self._status = status
        self._losses: dict[int, list[float]] = defaultdict(list)
        self._first = self._next = first_batch
        self._busy_s = 0.0
        self._peak_memory_bytes = 0

    def note_loss(self, batch: int, loss: float) -> None:
        """The loss of an update of a batch; a batch's is their mean."""
        self._losses[batch].append(loss)

    def add(self, spent: Spent) -> None:
        """The next batch is measured."""
        losses = self._losses.pop(self._next, None)
        loss = fmean(losses) if losses else math.nan
        row = np.array((spent.end_s, spent.busy_s, loss, spent.peak_memory_bytes), dtype=_ROW)
        self._file.write(row.tobytes())
        self._next += 1
        self._busy_s += spent.busy_s
        if UNKNOWN_BYTES in (self._peak_memory_bytes, spent.peak_memory_bytes):
            self._peak_memory_bytes = UNKNOWN_BYTES
        else:
            self._peak_memory_bytes = max(self._peak_memory_bytes, spent.peak_memory_bytes)
        self._status.measured(
            self._next - self._first,
            end_s=spent.end_s,
            busy_s=self._busy_s,
            memory_bytes=spent.memory_bytes,
            peak_memory_bytes=self._peak_memory_bytes,
        )

    def close(self) -> None:
        self._file.close()

    @property
    def busy_s(self) -> float:
        """Seconds of compute in all batches."""
        return self._busy_s

    @property
    def peak_memory_bytes(self) -> int | None:
        """The peak bytes of all batches; None where not all can be counted."""
        return None if self._peak_memory_bytes == UNKNOWN_BYTES else self._peak_memory_bytes


def deferred_share(lane: Lane, *, defers: bool) -> float | None:
    """p2's share of the time of a lane's split backwards; None if none is split."""
    input_s = weight_s = 0.0
    for instruction, start_s, end_s in zip(lane.instructions, lane.start_s, lane.end_s, strict=True):
        if isinstance(instruction, BackwardInput):
            input_s += end_s - start_s
        elif isinstance(instruction, BackwardWeight):
            weight_s += end_s - start_s
    if not input_s:
        return None
    return weight_s / (input_s + weight_s) if defers else 0.0


def compute_spread(busy_s: NDArray[np.float64]) -> float | None:
    """How much longer a batch's compute took in the slowest part of a run than in the fastest, by their medians.

    None where the run is too short for the parts, or computes nothing.
    """
    if len(busy_s) < PARTS * BATCHES_A_PART:
        return None
    medians_s = [float(np.median(part)) for part in np.array_split(busy_s, PARTS)]
    return max(medians_s) / min(medians_s) - 1 if min(medians_s) > 0 else None


def read_batches(path: Path) -> Rows:
    """All whole rows of a rank, read from the file on access."""
    rows = path.stat().st_size // _ROW.itemsize
    return np.memmap(path, dtype=_ROW, mode="r", shape=(rows,)) if rows else np.empty(0, dtype=_ROW)


class RunMeasurements:
    """A run's results, by rank. Of a long run the ranks have recorded the first and the last `window` batches."""

    def __init__(self, job: RunJob, results: Sequence[RankResult]) -> None:
        self._job = job
        self._results = tuple(results)
        self._rows = [read_batches(job.directory.batches(result.lane.rank)) for result in results]
        self.window = job.window(job.program())

    def ranks(self) -> tuple[RankReport, ...]:
        """The report of each rank."""
        return tuple(
            RankReport(
                rank=result.lane.rank,
                stage=result.lane.stage,
                replica=result.lane.replica,
                peak_memory_bytes=result.peak_memory_bytes,
                peak_resident_bytes=result.peak_resident_bytes,
                device_memory=result.device_memory,
                off_processor_fraction=result.off_processor_fraction,
                deferred_share=result.deferred_share,
                compute_spread=compute_spread(rows["busy_s"]),
                reads_memory_of=result.reads_memory_of,
            )
            for result, rows in zip(self._results, self._rows, strict=True)
        )

    @cached_property
    def ends(self) -> Timeline:
        """Everything that was recorded: the whole run, or both of its ends."""
        batches = self._job.batches if self.window is None else 2 * self.window
        lanes = tuple(result.lane.lane() for result in self._results)
        return Timeline(lanes=lanes, batch_size=self._job.plan.batch_size, batches=batches)

    def timeline(self) -> Timeline:
        """The part that was recorded without a gap: all of the run, or its last batches."""
        return self._window(lambda result: slice(result.first_instructions, None))

    def _window(self, part: Callable[[RankResult], slice]) -> Timeline:
        """The batches of one end: a part of each rank's instructions. All of them where there is no window."""
        ends = self.ends
        if self.window is None:
            return ends
        columns = ("instructions", "start_s", "end_s", "memory_bytes")
        lanes = tuple(
            replace(lane, **{name: getattr(lane, name)[part(result)] for name in columns})
            for lane, result in zip(ends.lanes, self._results, strict=True)
        )
        return replace(ends, lanes=lanes, batches=self.window)

    def beginning(self) -> tuple[Timeline, list[float | None]] | None:
        """The first second's batches, and by rank the share of compute in them that other programs took."""
        first = beginning(self._window(lambda result: slice(result.first_instructions)))
        if first is None:
            return None
        off: list[float | None] = []
        for rows, result in zip(self._rows, self._results, strict=True):
            known = result.first_processor_s[: first.batches]
            busy_s = float(rows["busy_s"][: len(known)].sum())
            off.append(max(1.0 - known[-1] / busy_s, 0.0) if known and busy_s > 0 else None)
        return first, self.others(off)

    def others(self, off_processor: Sequence[float | None]) -> list[float | None]:
        """By rank other programs' part of the share of compute off the processor; None if it is unknown."""
        shares = shares_of_others([result.cores for result in self._results])
        pairs = zip(off_processor, shares, strict=True)
        return [None if off is None or share is None else off * share for off, share in pairs]

    def recorded(self) -> dict[str, int]:
        """The number of recorded batches."""
        both = (self.window, self.window) if self.window is not None else (self._job.batches, 0)
        return {"first_batches": both[0], "last_batches": both[1], "left_out": self._job.batches - sum(both)}

    def summary(self) -> Summary:
        """The summary of all batches."""
        lanes = (
            LaneSummary(
                rank=result.lane.rank,
                stage=result.lane.stage,
                replica=result.lane.replica,
                busy_s=result.busy_s,
                peak_memory_bytes=result.peak_memory_bytes,
            )
            for result in self._results
        )
        ends = self.ends

        # The median time between two batches' ends on the input stage's first replica, as `throughput` has it.
        first = next(i for i, lane in enumerate(ends.lanes) if lane.stage == 0 and lane.replica == 0)
        ends_s = self._rows[first]["end_s"]
        if len(ends_s) > 1:
            batch_s = float(np.median(np.diff(ends_s)))
        else:
            batch_s = float(ends_s[0] - min(lane.start_s[0] for lane in ends.lanes))

        return Summary(
            lanes=tuple(lanes),
            batch_size=self._job.plan.batch_size,
            batches=self._job.batches,
            makespan_s=ends.makespan_s,
            batch_s=batch_s,
        )

    @property
    def losses(self) -> tuple[float, ...]:
        return self._steps.losses

    def write_steps(self, path: Path, *, before: Path) -> None:
        """One line for each step of the folder's runs (`StepRows.write`)."""
        self._steps.write(path, before=before)

    @cached_property
    def _steps(self) -> "StepRows":
        ranks = tuple(result.lane.rank for result in self._results)
        return StepRows(job=self._job, ranks=ranks, rows=tuple(self._rows))


def last_batches(timeline: Timeline, batches: int) -> Timeline:
    """The timeline's last batches. A batch ends with its last update on every worker."""
    lanes = []
    for lane in timeline.lanes:
        updates = [index for index, one in enumerate(lane.instructions) if isinstance(one, Update)]
        a_batch = len(updates) // timeline.batches
        start = updates[-batches * a_batch - 1] + 1 if batches < timeline.batches else 0
        columns = ("instructions", "start_s", "end_s", "memory_bytes")
        lanes.append(replace(lane, **{name: getattr(lane, name)[start:] for name in columns}))
    return replace(timeline, lanes=tuple(lanes), batches=batches)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRows:
    """The rows of some ranks, of a job's steps from its first one on."""

    job: RunJob
    ranks: tuple[int, ...]
    rows: tuple[Rows, ...]

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """A loss a step: the mean over the last stage's replicas and, for PipeDream, over the step's updates."""
        columns = [rows["loss"] for rows in self.rows if not np.isnan(rows["loss"][0])]
        return tuple(np.mean(columns, axis=0).tolist())

    def write(self, path: Path, *, before: Path) -> None:
        """One line for each step: its loss, its end, its samples a second, and by rank compute and memory.

        Bytes that cannot be counted leave their cell empty.
        A resumed run begins with the lines of `before`: the folder's steps up to its checkpoint.
        """
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["step", "loss", "end_s", "samples_per_s"]
                + [f"busy_s_rank_{rank}" for rank in self.ranks]
                + [f"peak_memory_bytes_rank_{rank}" for rank in self.ranks]
            )
            if self.job.first_step:
                writer.writerows(_lines_until(before, self.job.first_step))
            writer.writerows(self.lines())

    def lines(self, done: int = 0, last_s: float = 0.0) -> Iterator[list[Any]]:
        """The lines of these rows, after `done` steps measured earlier, the last of which ended at `last_s`."""
        for index, rows in enumerate(zip(*self.rows, strict=True)):
            end_s = max(float(row["end_s"]) for row in rows)
            rate = self.job.plan.batch_size / (end_s - last_s) if end_s > last_s else ""
            head = [self.job.first_step + done + index + 1, self.losses[index], end_s, rate]
            last_s = end_s
            held = ["" if row["memory_bytes"] == UNKNOWN_BYTES else row["memory_bytes"] for row in rows]
            yield head + [row["busy_s"] for row in rows] + held


@contextmanager
def logging_steps(job: RunJob) -> Iterator[None]:
    """While it is active, `steps.csv` has a line as soon as all ranks have measured the step; it is begun anew.

    Its first lines are those up to the job's first step. Raises OSError if it cannot be begun.
    """
    ranks, path = tuple(range(job.plan.workers)), job.directory.root / STEPS
    done, last_s = 0, 0.0
    aside = path.with_name(f"{STEPS}.part")
    StepRows(job=job, ranks=ranks, rows=()).write(aside, before=path)
    aside.replace(path)

    def add() -> None:
        """Writes the lines of the steps that all ranks have measured since, and flushes them."""
        nonlocal done, last_s
        steps = measured_steps(job) - done
        if steps <= 0:
            return
        files = (job.directory.batches(rank) for rank in ranks)
        rows = tuple(np.fromfile(each, dtype=_ROW, count=steps, offset=done * _ROW.itemsize) for each in files)
        try:
            csv.writer(file).writerows(StepRows(job=job, ranks=ranks, rows=rows).lines(done, last_s))
            file.flush()
        except OSError as error:  # the end of the run writes the whole file, or says why not
            _log.warning("%s: %s", path, error)
        done, last_s = done + steps, max(float(row["end_s"][-1]) for row in rows)

    with path.open("a", newline="", encoding="utf-8") as file:
        try:
            with polling(add, 0.5, name="steps"):
                yield
        finally:
            add()


def measured_steps(job: RunJob) -> int:
    """How many steps all ranks have measured in the job's last start."""
    files = [job.directory.batches(rank) for rank in range(job.plan.workers)]
    return min(file.stat().st_size // _ROW.itemsize if file.exists() else 0 for file in files)


def losses_before(path: Path, step: int) -> tuple[float, ...]:
    """The losses in a file of steps up to a step, as far back as no step is missing."""
    losses: list[float] = []
    last = 0
    for line in _lines_until(path, step):
        if int(line[0]) != last + 1:
            losses = []
        last = int(line[0])
        losses.append(float(line[1]))
    return tuple(losses) if last == step else ()


def _lines_until(path: Path, step: int) -> Iterator[list[str]]:
    """The lines of a file of steps, if there is one, up to a step. A last line that was cut off is left out."""
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8") as file:
        head = next(csv.reader([file.readline()]), [])
        whole = (line for line in file if line.endswith("\n"))
        for line in csv.reader(whole):
            if len(line) == len(head) and line[0].isdecimal() and int(line[0]) <= step:
                yield line


def rows_of_attempt(earlier: RunJob, step: int) -> StepRows | None:
    """The measurements of an unfinished attempt's ranks, up to a step; None if there are none."""
    ranks = tuple(range(earlier.plan.workers))
    files = [earlier.directory.batches(rank) for rank in ranks]
    if not all(file.is_file() for file in files):
        return None
    rows = [read_batches(file) for file in files]
    steps = min(step - earlier.first_step, *map(len, rows))
    return StepRows(job=earlier, ranks=ranks, rows=tuple(each[:steps] for each in rows)) if steps > 0 else None
