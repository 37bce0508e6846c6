"""1F1B with a flush (PipeDream-Flush; PipeDream-2BW, section 3.2): fill, then one backward for one forward, drain.

stage 0   F1 F2 F3          B1 F4 B2    B3    B4 U1
stage 1      F1 F2    B1 F3 B2 F4 B3    B4 U1
stage 2         F1 B1 F2 B2 F3 B3 F4 B4 U1
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

from pipeplan.documents.plan import Worker
from pipeplan.programs.instructions import Instruction, Update, backward, forward
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule

T = TypeVar("T")

Block: TypeAlias = tuple[Instruction, ...]
"""A stage's consecutive instructions of a microbatch."""


class OneFOneB(Schedule):
    """Fill, then one backward for one forward, drain; an update."""

    name = "1f1b"
    source = "PipeDream-Flush: PipeDream-2BW 2021, section 3.2"
    alternates = True
    fills = True
    flushes = True
    fills_gaps = True
    zero_bubble = "zb-h1"

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Batch t runs on version t; at most depth - stage microbatches are in flight; empty between batches."""
        limit = pipeline.in_flight_limit(worker.stage)
        for batch in pipeline.batch_range():
            numbers = pipeline.microbatches_of(worker, batch)
            forwards: list[Instruction] = [forward(k, batch) for k in numbers]
            yield from alternating(forwards, [backward(k, batch) for k in numbers], limit)
            yield Update(batch + 1)

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """As many as there are stages from this one on (PipeDream 2018, section 3.3), but at most the batch."""
        return min(depth - stage, microbatches)

    def gathers_beside(self, *, held: int, microbatches: int) -> bool:
        """If a batch has more microbatches."""
        return held < microbatches

    def paper_in_flight(self, *, depth: int, microbatches: int) -> int:
        """The depth, even if a batch has fewer microbatches."""
        del microbatches
        return depth


def alternate(numbers: Sequence[int], in_flight: int) -> Iterator[tuple[int, bool]]:
    """Microbatch numbers in 1F1B order, True for a forward: `in_flight` forwards, then a backward for a forward."""
    for i, k in enumerate(numbers):
        if i >= in_flight:
            yield numbers[i - in_flight], False
        yield k, True
    yield from ((k, False) for k in numbers[max(len(numbers) - in_flight, 0) :])


def alternating(forwards: Sequence[T], backwards: Sequence[T], in_flight: int) -> list[T]:
    """The same order of given forwards and backwards: much faster than one microbatch at a time."""
    steady = max(len(forwards) - in_flight, 0)
    one_by_one = woven(backwards[:steady], forwards[in_flight:])
    return [*forwards[:in_flight], *one_by_one, *backwards[steady:]]


def woven(*columns: Sequence[T]) -> list[T]:
    """The first entries of columns of equal lengths, then the second ones, and so on."""
    rows = [*columns[0]] * len(columns)
    for place, column in enumerate(columns):
        rows[place :: len(columns)] = column
    return rows
