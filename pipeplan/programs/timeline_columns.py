"""Timelines as columns of small numbers, to draw pictures of long timelines.

A lane has five columns. An entry that follows from the entry before it is 0 or 1, and compression removes it:

words       which of `words`, (head, tail), stands around the instruction's number: `>F3:1` is (">F", ":1") around 3
numbers     the number, less that of the instruction before it on the lane with the same head
gaps        ticks from the end of the instruction before it (of the first: from `origin_s`) to its start
durations   ticks from its start to its end
held        bytes held once it was done, less those held before; no entry at all where they are unknown

Instructions and bytes come back exactly, and a time within half a tick. A tick is 2^-30 of the timeline's span.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pipeplan.documents.names import STRICT
from pipeplan.errors import require, require_amount, require_count
from pipeplan.programs.text import format_instruction, parse_instruction
from pipeplan.programs.timeline import Lane, Timeline, require_equal_columns

TICKS = 2**30
"""Ticks in a timeline's span."""

_PARTS = re.compile(r"([<>]?[A-Z])(\d+)(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneColumns:
    """A worker's lane."""

    rank: int
    stage: int
    replica: int
    words: tuple[int, ...]
    numbers: tuple[int, ...]
    gaps: tuple[int, ...]
    durations: tuple[int, ...]
    held: tuple[int, ...]

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        columns = {"numbers": self.numbers, "gaps": self.gaps, "durations": self.durations}
        require_equal_columns(self.words, memory_bytes=self.held, **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineColumns:
    """All workers' lanes, by rank; the number and size of the batches; and what the columns stand for."""

    lanes: tuple[LaneColumns, ...]
    words: tuple[tuple[str, str], ...]
    origin_s: float
    tick_s: float
    batch_size: int
    batches: int

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require(len(self.lanes) > 0, "lanes", "must hold at least one lane", self.lanes)
        require_amount("tick_s", self.tick_s)
        require_count("batch_size", self.batch_size)
        require_count("batches", self.batches)
        for lane in self.lanes:
            rule = f"must be places in words, below {len(self.words)}"
            require(all(0 <= word < len(self.words) for word in lane.words), "lanes.words", rule, lane.rank)

    def timeline(self) -> Timeline:
        """The timeline. Raises InvalidInputError for a text that is no instruction."""
        lanes = tuple(self._lane(lane) for lane in self.lanes)
        return Timeline(lanes=lanes, batch_size=self.batch_size, batches=self.batches)

    def _lane(self, lane: LaneColumns) -> Lane:
        last: dict[str, int] = {}
        instructions = []
        for word, step in zip(lane.words, lane.numbers, strict=True):
            head, tail = self.words[word]
            last[head] = last.get(head, 0) + step
            instructions.append(parse_instruction(f"{head}{last[head]}{tail}"))
        moments = tuple(accumulate(chain.from_iterable(zip(lane.gaps, lane.durations, strict=True))))
        start_s, end_s = (
            tuple(self.origin_s + ticks * self.tick_s for ticks in each) for each in (moments[::2], moments[1::2])
        )
        return Lane(
            rank=lane.rank,
            stage=lane.stage,
            replica=lane.replica,
            instructions=tuple(instructions),
            start_s=start_s,
            end_s=end_s,
            memory_bytes=tuple(accumulate(lane.held)),
        )


def timeline_columns(timeline: Timeline) -> TimelineColumns:
    """The timeline as columns."""
    origin_s = min((moment_s for lane in timeline.lanes for moment_s in lane.start_s), default=0.0)
    last_s = max((moment_s for lane in timeline.lanes for moment_s in lane.end_s), default=origin_s)
    tick_s = (last_s - origin_s) / TICKS
    words: dict[tuple[str, str], int] = {}

    def ticks(moments_s: Sequence[float]) -> npt.NDArray[np.int64]:
        since_s = np.array(moments_s, dtype=np.float64) - origin_s
        return np.rint(since_s / (tick_s or 1.0)).astype(np.int64)

    def columns(lane: Lane) -> LaneColumns:
        last: dict[str, int] = {}
        places, steps = [], []
        texts = "\n".join(map(format_instruction, lane.instructions))
        for head, digits, tail in _PARTS.findall(texts):  # one call for all lines: a match each takes twice the time
            number = int(digits)
            places.append(words.setdefault((head, tail), len(words)))
            steps.append(number - last.get(head, 0))
            last[head] = number
        starts, ends = ticks(lane.start_s), ticks(lane.end_s)
        return LaneColumns(
            rank=lane.rank,
            stage=lane.stage,
            replica=lane.replica,
            words=tuple(places),
            numbers=tuple(steps),
            gaps=tuple((starts - np.append(0, ends)[:-1]).tolist()),
            durations=tuple((ends - starts).tolist()),
            held=tuple(np.diff(np.array(lane.memory_bytes, dtype=np.int64), prepend=0).tolist()),
        )

    return TimelineColumns(
        lanes=tuple(map(columns, timeline.lanes)),
        words=tuple(words),
        origin_s=origin_s,
        tick_s=tick_s,
        batch_size=timeline.batch_size,
        batches=timeline.batches,
    )
