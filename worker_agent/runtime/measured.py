"""Measured: what all ranks of a run measured, put together."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from pipeplan.programs.timeline import Lane, LaneSummary, Summary, Timeline
from worker_agent.runtime.batches import read_batches
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.results import RankResult


class Measured:
    """A run's results, by rank. Of a long run the ranks have recorded the first and the last `window` batches."""

    def __init__(self, job: RunJob, results: Sequence[RankResult]) -> None:
        self._job = job
        self._results = tuple(results)
        self._rows = [read_batches(job.directory.batches(result.lane.rank)) for result in results]
        self.window = job.window(job.program())

    def ends(self) -> Timeline:
        """All that was recorded, at both ends of the run where that is not all of it."""
        batches = self._job.batches if self.window is None else 2 * self.window
        lanes = tuple(result.lane for result in self._results)
        return Timeline(lanes=lanes, batch_size=self._job.plan.batch_size, batches=batches)

    def timeline(self) -> Timeline:
        """What was recorded in one piece: all of the run, or its last batches."""
        if self.window is None:
            return self.ends()
        lanes = tuple(_from(result.lane, result.first_instructions) for result in self._results)
        return replace(self.ends(), lanes=lanes, batches=self.window)

    def recorded(self) -> dict[str, int]:
        """How much that is, in batches."""
        both = (self.window, self.window) if self.window is not None else (self._job.batches, 0)
        return {"first_batches": both[0], "last_batches": both[1], "left_out": self._job.batches - sum(both)}

    def summary(self) -> Summary:
        """What all batches came to."""
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
        ends = self.ends()
        return Summary(
            lanes=tuple(lanes),
            batch_size=self._job.plan.batch_size,
            batches=self._job.batches,
            makespan_s=ends.makespan_s,
            batch_s=self._batch_s(min(lane.start_s[0] for lane in ends.lanes)),
        )

    def _batch_s(self, start_s: float) -> float:
        """The median time between two batches' ends on the input stage's first replica, as `throughput` has it."""
        lanes = (result.lane for result in self._results)
        first = next(i for i, lane in enumerate(lanes) if lane.stage == 0 and lane.replica == 0)
        ends_s = self._rows[first]["end_s"]
        return float(np.median(np.diff(ends_s)) if len(ends_s) > 1 else ends_s[0] - start_s)

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """A loss a step: the mean over the last stage's replicas and, for PipeDream, over the step's updates."""
        columns = [rows["loss"] for rows in self._rows if not np.isnan(rows["loss"][0])]
        return tuple(np.mean(columns, axis=0).tolist())

    def write_steps(self, path: Path) -> None:
        """A line a step: its loss, when it was through, its samples a second, and by rank compute and memory."""
        ranks = [result.lane.rank for result in self._results]
        last_s = 0.0
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["step", "loss", "end_s", "samples_per_s"]
                + [f"busy_s_rank_{rank}" for rank in ranks]
                + [f"peak_memory_bytes_rank_{rank}" for rank in ranks]
            )
            for index, rows in enumerate(zip(*self._rows, strict=True)):
                end_s = max(float(row["end_s"]) for row in rows)
                rate = self._job.plan.batch_size / (end_s - last_s) if end_s > last_s else ""
                step = self._job.first_step + index + 1
                head = [step, self.losses[index], end_s, rate]
                last_s = end_s
                writer.writerow(head + [row["busy_s"] for row in rows] + [row["memory_bytes"] for row in rows])


def _from(lane: Lane, start: int) -> Lane:
    """What a worker did from its instruction number `start` on."""
    columns = ("instructions", "start_s", "end_s", "memory_bytes")
    return replace(lane, **{name: getattr(lane, name)[start:] for name in columns})
