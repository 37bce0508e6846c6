"""Naive model parallelism: one microbatch in the whole pipeline at a time.

stage 0   F1          B1 F2          B2 U1
stage 1      F1    B1       F2    B2 U1
stage 2         F1 B1          F2 B2 U1
"""

from collections.abc import Iterator

from pipeplan.documents.plan import Worker
from pipeplan.programs.instructions import Backward, Forward, Instruction, Update
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule


class Naive(Schedule):
    """One microbatch in the whole pipeline at a time."""

    name = "naive"
    source = "model parallelism without pipelining"
    alternates = True
    flushes = True
    pipelined = False

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Forward and backward of each microbatch in turn; batch t runs on version t, an update closes it."""
        for batch in pipeline.batch_range():
            for k in pipeline.microbatches_of(worker, batch):
                yield Forward(k, batch)
                yield Backward(k, batch)
            yield Update(batch + 1)

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """One microbatch."""
        del depth, stage, microbatches
        return 1

    def gathers_beside(self, *, held: int, microbatches: int) -> bool:
        """If a batch has more microbatches."""
        return held < microbatches
