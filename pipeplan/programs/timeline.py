"""Timeline: what every worker did and when. The simulator predicts it, the runtime records it.

A timeline gives the rates: seconds a batch, samples a second. A summary holds a timeline's totals. For a run that is
too long for a timeline, the summary is all that is known.
"""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from statistics import median
from typing import ClassVar

from pipeplan.documents.names import STRICT
from pipeplan.errors import require, require_count
from pipeplan.programs.instructions import Instruction, Update, is_compute


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """One instruction's execution, [start_s, end_s), and the bytes held once it was done; None: unknown.

    For a backward that recomputes by block, the bytes are the peak while it runs.
    """

    instruction: Instruction
    start_s: float
    end_s: float
    memory_bytes: int | None


def require_equal_columns(instructions: Sized, *, memory_bytes: Sized, **columns: Sized) -> None:
    """Raises InvalidInputError unless every column has as many entries as there are instructions.

    The bytes held are unknown where their column has none.
    """
    if len(memory_bytes):
        columns["memory_bytes"] = memory_bytes
    rule = f"must have as many entries as instructions ({len(instructions)})"
    for field, column in columns.items():
        require(len(column) == len(instructions), field, rule, len(column))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One worker's events, as columns: the instructions, times since the run's start, bytes held.

    `memory_bytes` is empty where the runtime could not count all that the worker held.
    """

    rank: int
    stage: int
    replica: int
    instructions: tuple[Instruction, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        columns = {"start_s": self.start_s, "end_s": self.end_s, "memory_bytes": self.memory_bytes}
        require_equal_columns(self.instructions, **columns)

    def events(self) -> Iterator[TimelineEvent]:
        """The events in execution order."""
        memory_bytes = self.memory_bytes or repeat(None, len(self.instructions))
        columns = zip(self.instructions, self.start_s, self.end_s, memory_bytes, strict=True)
        for instruction, start_s, end_s, held_bytes in columns:
            yield TimelineEvent(instruction=instruction, start_s=start_s, end_s=end_s, memory_bytes=held_bytes)

    @property
    def busy_s(self) -> float:
        """Seconds of compute: waiting for data, transfers and gradient exchange are not in it."""
        columns = zip(self.instructions, self.start_s, self.end_s, strict=True)
        return sum(end_s - start_s for instruction, start_s, end_s in columns if is_compute(instruction))

    @property
    def peak_memory_bytes(self) -> int:
        """The peak of the bytes held after an instruction. Raises ValueError where it is unknown."""
        if self.instructions and not self.memory_bytes:
            raise ValueError("the bytes that this worker held are unknown")
        return max(self.memory_bytes, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All workers' lanes, by rank, and the number and size of the batches, from which rates follow."""

    lanes: tuple[Lane, ...]
    batch_size: int
    batches: int

    def __post_init__(self) -> None:
        require(len(self.lanes) > 0, "lanes", "must hold at least one lane", self.lanes)
        require_count("batch_size", self.batch_size)
        require_count("batches", self.batches)

    @property
    def makespan_s(self) -> float:
        """From the first event's start to the last one's end."""
        starts = [lane.start_s[0] for lane in self.lanes if lane.start_s]
        ends = [lane.end_s[-1] for lane in self.lanes if lane.end_s]
        return max(ends, default=0.0) - min(starts, default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The share of the workers' time in which they do not compute, start-up and drain included."""
        total_s = self.makespan_s * len(self.lanes)
        return 1.0 - sum(lane.busy_s for lane in self.lanes) / total_s if total_s > 0 else 0.0

    @property
    def busy_fraction(self) -> tuple[float, ...]:
        """Every lane's share of the makespan spent computing."""
        span_s = self.makespan_s
        return tuple(lane.busy_s / span_s if span_s > 0 else 0.0 for lane in self.lanes)


def throughput_samples_per_s(timeline: Timeline) -> float:
    """Samples a second in steady state: a batch over `batch_s`."""
    return timeline.batch_size / batch_s(timeline)


def batch_s(timeline: Timeline) -> float:
    """The median time between two batches' ends.

    A batch ends with its last update on the input stage's first replica: that stage is the last to update, and a
    flush's whole bubble counts. The first batch fills the pipeline and is left out where there is more than one. The
    median, as in profiles, leaves out what other programs took from a few batches.
    """
    ends_s = batch_ends_s(timeline)
    if len(ends_s) == 1:
        start_s = min(lane.start_s[0] for lane in timeline.lanes)
        return ends_s[0] - start_s
    return median(later - earlier for earlier, later in pairwise(ends_s))


def steady_batch_s(ends_s: Sequence[float], period: int) -> float:
    """The mean time between two batches' ends (`batch_ends_s`), of a play of four batches at least.

    Batches may alternate between long and short; the median would be one of these times. They may repeat after `period`
    batches: the mean is over a multiple of it, if there are as many. The batches that fill the pipeline
    (the first one and the first eighth) and those that drain it (the last two and the last eighth) are left out.
    """
    last = len(ends_s) - 1 - max(len(ends_s) // 8, 2)
    counted = last - len(ends_s) // 8
    counted -= counted % period if counted > period else 0
    return (ends_s[last] - ends_s[last - counted]) / counted


def flushed_batch_s(ends_s: Sequence[float]) -> float:
    """The time between the ends of the first two batches (`batch_ends_s`), of a schedule with a flush.

    The pipeline is empty between batches, so all are equal but the first and, where exchanges overlap the compute, the
    last of three or more. If exchanges do not overlap, two batches are enough.
    """
    first_s, second_s, *_ = ends_s
    return second_s - first_s


def batch_ends_s(timeline: Timeline) -> list[float]:
    """When the batches end, on the input stage's first replica."""
    first = next(lane for lane in timeline.lanes if lane.stage == 0 and lane.replica == 0)
    columns = zip(first.instructions, first.end_s, strict=True)
    updated_s = [end_s for instruction, end_s in columns if isinstance(instruction, Update)]
    updates_a_batch = len(updated_s) // timeline.batches
    return updated_s[updates_a_batch - 1 :: updates_a_batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSummary:
    """One worker: seconds of compute, and the most bytes held after any instruction (None: unknown)."""

    rank: int
    stage: int
    replica: int
    busy_s: float
    peak_memory_bytes: int | None

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
    """A timeline's totals."""
    lanes = (
        LaneSummary(
            rank=lane.rank,
            stage=lane.stage,
            replica=lane.replica,
            busy_s=lane.busy_s,
            peak_memory_bytes=lane.peak_memory_bytes if lane.memory_bytes else None,
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
    """The summary with more batches in the middle, each like the others: it equals a simulation of all of them."""
    longer = batches / summary.batches
    return replace(
        summary,
        lanes=tuple(replace(lane, busy_s=lane.busy_s * longer) for lane in summary.lanes),
        batches=batches,
        makespan_s=summary.makespan_s + (batches - summary.batches) * summary.batch_s,
    )
