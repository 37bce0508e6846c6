"""Timelines as documents, for files, HTTP and the database. Instructions are texts here, and typed elsewhere."""

from dataclasses import dataclass
from typing import ClassVar

from pipeplan.documents.names import STRICT
from pipeplan.errors import LARGEST_AMOUNT, require, require_count
from pipeplan.programs.text import format_instruction, parse_instruction
from pipeplan.programs.timeline import Lane, Timeline, require_equal_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDocument:
    """A worker's `Lane`, with its instructions in their text form."""

    rank: int
    stage: int
    replica: int
    instructions: tuple[str, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        columns = {"start_s": self.start_s, "end_s": self.end_s, "memory_bytes": self.memory_bytes}
        require_equal_columns(self.instructions, **columns)
        for field, moments in (("start_s", self.start_s), ("end_s", self.end_s)):
            for moment_s in (min(moments, default=0.0), max(moments, default=0.0)):
                require(abs(moment_s) <= LARGEST_AMOUNT, field, f"must be within {LARGEST_AMOUNT:g} s of 0", moment_s)

    def lane(self) -> Lane:
        """The lane. Raises InvalidInputError for a text that is no instruction."""
        return Lane(
            rank=self.rank,
            stage=self.stage,
            replica=self.replica,
            instructions=tuple(map(parse_instruction, self.instructions)),
            start_s=self.start_s,
            end_s=self.end_s,
            memory_bytes=self.memory_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineDocument:
    """All workers' lanes, by rank, and the number and size of the batches: a `Timeline` in its stored form."""

    lanes: tuple[LaneDocument, ...]
    batch_size: int
    batches: int

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require(len(self.lanes) > 0, "lanes", "must hold at least one lane", self.lanes)
        require_count("batch_size", self.batch_size)
        require_count("batches", self.batches)

    def timeline(self) -> Timeline:
        """The timeline. Raises InvalidInputError for a text that is no instruction."""
        lanes = tuple(lane.lane() for lane in self.lanes)
        return Timeline(lanes=lanes, batch_size=self.batch_size, batches=self.batches)


def lane_document(lane: Lane) -> LaneDocument:
    """The lane as a document."""
    return LaneDocument(
        rank=lane.rank,
        stage=lane.stage,
        replica=lane.replica,
        instructions=tuple(map(format_instruction, lane.instructions)),
        start_s=lane.start_s,
        end_s=lane.end_s,
        memory_bytes=lane.memory_bytes,
    )


def timeline_document(timeline: Timeline) -> TimelineDocument:
    """The timeline as a document."""
    lanes = tuple(map(lane_document, timeline.lanes))
    return TimelineDocument(lanes=lanes, batch_size=timeline.batch_size, batches=timeline.batches)
