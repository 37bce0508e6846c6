"""Timeline: what every worker did and when. The simulator predicts it, the runtime records it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planner_service.core.errors import require, require_count
from planner_service.core.profile import STRICT
from planner_service.core.schedule.instructions import Instruction
from planner_service.core.schedule.text import COMPUTE_LETTERS, parse_instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One instruction's execution, [start_s, end_s), and the bytes held once it was done."""

    instruction: Instruction
    start_s: float
    end_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One worker's events, as columns: the instructions in their text form, times since the run's start, bytes held."""

    rank: int
    stage: int
    replica: int
    instructions: tuple[str, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for field in ("start_s", "end_s", "memory_bytes"):
            rule = f"must have as many entries as instructions ({len(self.instructions)})"
            require(len(getattr(self, field)) == len(self.instructions), field, rule, len(getattr(self, field)))

    def events(self) -> Iterator[Event]:
        """The events in execution order."""
        columns = zip(self.instructions, self.start_s, self.end_s, self.memory_bytes, strict=True)
        for text, start_s, end_s, memory_bytes in columns:
            yield Event(instruction=parse_instruction(text), start_s=start_s, end_s=end_s, memory_bytes=memory_bytes)

    @property
    def busy_s(self) -> float:
        """Seconds of compute: waiting for data, transfers and gradient exchange are not in it."""
        columns = zip(self.instructions, self.start_s, self.end_s, strict=True)
        return sum(end_s - start_s for text, start_s, end_s in columns if text[0] in COMPUTE_LETTERS)

    @property
    def peak_memory_bytes(self) -> int:
        """The most that was held after any instruction."""
        return max(self.memory_bytes, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All workers' lanes, by rank, and what a batch holds, so that rates can be read off it."""

    lanes: tuple[Lane, ...]
    batch_size: int
    batches: int

    __pydantic_config__: ClassVar = STRICT

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
