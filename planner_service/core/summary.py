"""Summary: what a timeline came to. Of a run that is too long for a timeline it is what is known of all of it."""

from dataclasses import dataclass, replace
from typing import ClassVar

from planner_service.core.profile import STRICT
from planner_service.core.throughput import batch_s
from planner_service.core.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSummary:
    """One worker: seconds of compute, and the most bytes held after any instruction."""

    rank: int
    stage: int
    replica: int
    busy_s: float
    peak_memory_bytes: int

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All workers, by rank. `makespan_s` is from the first event's start to the last one's end, `batch_s` the median
    time between two batches' ends.
    """

    lanes: tuple[LaneSummary, ...]
    batch_size: int
    batches: int
    makespan_s: float
    batch_s: float

    __pydantic_config__: ClassVar = STRICT

    @property
    def throughput_samples_per_s(self) -> float:
        """Samples a second in steady state."""
        return self.batch_size / self.batch_s

    @property
    def bubble_fraction(self) -> float:
        """The share of the workers' time in which they do not compute, start-up and drain included."""
        total_s = self.makespan_s * len(self.lanes)
        return 1.0 - sum(lane.busy_s for lane in self.lanes) / total_s if total_s > 0 else 0.0


def summarise(timeline: Timeline) -> Summary:
    """What a timeline came to."""
    lanes = (
        LaneSummary(
            rank=lane.rank,
            stage=lane.stage,
            replica=lane.replica,
            busy_s=lane.busy_s,
            peak_memory_bytes=lane.peak_memory_bytes,
        )
        for lane in timeline.lanes
    )
    return Summary(
        lanes=tuple(lanes),
        batch_size=timeline.batch_size,
        batches=timeline.batches,
        makespan_s=timeline.makespan_s,
        batch_s=batch_s(timeline),
    )


def lengthened(summary: Summary, batches: int) -> Summary:
    """The summary of the same with more batches in the middle, each as the others: what a simulation of all gives."""
    longer = batches / summary.batches
    return replace(
        summary,
        lanes=tuple(replace(lane, busy_s=lane.busy_s * longer) for lane in summary.lanes),
        batches=batches,
        makespan_s=summary.makespan_s + (batches - summary.batches) * summary.batch_s,
    )
