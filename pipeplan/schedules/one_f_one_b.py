"""1F1B with a flush (PipeDream-Flush; PipeDream-2BW, section 3.2): fill, then one backward for one forward, drain.

stage 0   F1 F2 F3          B1 F4 B2    B3    B4 U1
stage 1      F1 F2    B1 F3 B2 F4 B3    B4 U1
stage 2         F1 B1 F2 B2 F3 B3 F4 B4 U1
"""

from collections.abc import Iterator, Sequence

from pipeplan.documents.plan import Worker
from pipeplan.programs.instructions import Backward, Forward, Instruction, Update
from pipeplan.programs.pipeline import Pipeline


def one_f_one_b(pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
    """Batch t runs on version t; at most depth - stage microbatches are in flight; empty between batches."""
    limit = pipeline.in_flight_limit(worker.stage)
    for batch in pipeline.batch_range():
        for k, forward in alternate(pipeline.microbatches_of(worker, batch), limit):
            yield Forward(k, batch) if forward else Backward(k, batch)
        yield Update(batch + 1)


def alternate(numbers: Sequence[int], in_flight: int) -> Iterator[tuple[int, bool]]:
    """Microbatch numbers in 1F1B order, True for a forward: `in_flight` forwards, then a backward for a forward."""
    for i, k in enumerate(numbers):
        if i >= in_flight:
            yield numbers[i - in_flight], False
        yield k, True
    yield from ((k, False) for k in numbers[max(len(numbers) - in_flight, 0) :])
