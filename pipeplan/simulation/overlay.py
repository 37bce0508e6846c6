"""Overlay: the last batches of a run, as predicted and as measured, instruction by instruction.

    predicted  F7-- B5---- F8-- B6----            both begin at 0
    measured   F7--- B5------ F8--- B6-----       F7: +25 %

Both timelines end with the same instructions. A lane starts after the update that ends the batch before the shown ones.
A checkpoint after the last batch is left out: it may take as long as many batches.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pipeplan.programs.instructions import Checkpoint, Instruction, Update
from pipeplan.programs.timeline import Lane, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One instruction of a worker, with its times in both timelines of an overlay."""

    rank: int
    stage: int
    replica: int
    instruction: Instruction
    predicted_start_s: float
    predicted_end_s: float
    measured_start_s: float
    measured_end_s: float

    @property
    def predicted_s(self) -> float:
        """Its predicted duration."""
        return self.predicted_end_s - self.predicted_start_s

    @property
    def measured_s(self) -> float:
        """Its measured duration."""
        return self.measured_end_s - self.measured_start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """A kind of instruction on a stage: its number of runs, its median durations, and the total seconds."""

    stage: int
    kind: str
    count: int
    predicted_s: float
    measured_s: float
    longer_s: float


def overlaid(predicted: Timeline, measured: Timeline, batches: int) -> tuple[Timeline, Timeline]:
    """The last batches of both timelines, at least one and at most `batches`, each from 0 on.

    `measured` may be the end of a longer timeline; only whole batches are taken from it, if it has one.
    """
    a_batch = _updates_a_batch(predicted)
    whole = (len(_updates(lane)) // each for lane, each in zip(measured.lanes, a_batch, strict=True))
    kept = max(min(batches, predicted.batches, *whole), 1)
    return _tail(predicted, a_batch, kept), _tail(measured, a_batch, kept)


def holds(measured: Timeline, predicted: Timeline, batches: int) -> bool:
    """Whether the end of a timeline holds its last batches whole: every lane has the update before them."""
    every = zip(measured.lanes, _updates_a_batch(predicted), strict=True)
    return all(len(_updates(lane)) > batches * a_batch for lane, a_batch in every)


def _updates_a_batch(predicted: Timeline) -> list[int]:
    """By lane: a rank with several stages has several."""
    return [max(len(_updates(lane)) // predicted.batches, 1) for lane in predicted.lanes]


def _updates(lane: Lane) -> list[int]:
    return [index for index, each in enumerate(lane.instructions) if isinstance(each, Update)]


def _tail(timeline: Timeline, a_batch: Sequence[int], batches: int) -> Timeline:
    """The last batches, from 0 on; `a_batch` is the number of updates that each lane has in a batch."""
    lanes = [_cut(lane, batches * each) for lane, each in zip(timeline.lanes, a_batch, strict=True)]
    origin_s = min((lane.start_s[0] for lane in lanes if lane.start_s), default=0.0)
    shifted = tuple(
        replace(
            lane,
            start_s=tuple(moment_s - origin_s for moment_s in lane.start_s),
            end_s=tuple(moment_s - origin_s for moment_s in lane.end_s),
        )
        for lane in lanes
    )
    return Timeline(lanes=shifted, batch_size=timeline.batch_size, batches=batches)


def _cut(lane: Lane, kept: int) -> Lane:
    """The part that holds the last `kept` updates, after the one before them; the whole lane if there is none."""
    updates, stop = _updates(lane), len(lane.instructions)
    start = updates[-kept - 1] + 1 if kept < len(updates) else 0
    while stop > start and isinstance(lane.instructions[stop - 1], Checkpoint):
        stop -= 1
    return replace(
        lane,
        instructions=lane.instructions[start:stop],
        start_s=lane.start_s[start:stop],
        end_s=lane.end_s[start:stop],
        memory_bytes=lane.memory_bytes[start:stop],
    )


def pairs(predicted: Timeline, measured: Timeline) -> Iterator[Pair]:
    """The instructions in both timelines, rank by rank in execution order."""
    for expected, seen in zip(predicted.lanes, measured.lanes, strict=True):
        moments = dict(zip(expected.instructions, zip(expected.start_s, expected.end_s, strict=True), strict=True))
        for event in seen.events():
            if event.instruction in moments:
                start_s, end_s = moments[event.instruction]
                yield Pair(
                    rank=seen.rank,
                    stage=seen.stage,
                    replica=seen.replica,
                    instruction=event.instruction,
                    predicted_start_s=start_s,
                    predicted_end_s=end_s,
                    measured_start_s=event.start_s,
                    measured_end_s=event.end_s,
                )


def differences(
    predicted: Timeline, measured: Timeline, stages: Sequence[Sequence[int]]
) -> tuple[StageDifference, ...]:
    """By stage and kind of instruction, in the stages' order; within a stage, the kind with the largest excess over its
    prediction first. `stages` are those of each rank of a pipeline, by chunk.
    """
    found: dict[tuple[int, str], list[Pair]] = defaultdict(list)
    for pair in pairs(predicted, measured):
        stage = stages[pair.stage][pair.instruction.chunk]
        found[stage, type(pair.instruction).__name__].append(pair)
    rows = [
        StageDifference(
            stage=stage,
            kind=kind,
            count=len(each),
            predicted_s=median(pair.predicted_s for pair in each),
            measured_s=median(pair.measured_s for pair in each),
            longer_s=sum(pair.measured_s - pair.predicted_s for pair in each),
        )
        for (stage, kind), each in found.items()
    ]
    shown = [row for row in rows if row.predicted_s or row.measured_s or row.longer_s]
    return tuple(sorted(shown, key=lambda row: (row.stage, -row.longer_s, row.kind)))
