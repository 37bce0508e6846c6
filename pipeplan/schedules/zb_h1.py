"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.2): 1F1B with the backward split in two.

stage 0   F1 F2       I1 W1 F3 I2 W2 I3 W3 U1
stage 1      F1    I1 F2 I2 W1 F3 I3 W2 W3 U1

The order is that of 1F1B. The further a stage is from the input, the fewer microbatches 1F1B keeps there: as many more
may wait for their weights' gradients, and their work fills the end of the batch.
"""

from collections.abc import Iterator

from pipeplan.documents.plan import Worker
from pipeplan.programs.instructions import BackwardInput, BackwardWeight, Forward, Instruction, Update
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.one_f_one_b import alternate


class ZBH1(Schedule):
    """1F1B with the backward split in two."""

    name = "zb-h1"
    source = "Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.2"
    alternates = True
    fills = True
    flushes = True
    splits_backward = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Batch t runs on version t; `stage` microbatches wait for their weights' gradients while others come in.

        From forward to BackwardWeight at most depth microbatches are kept on any stage, as 1F1B keeps on the first.
        With F, B and W seconds for forward, gradient of the input and of the weights the bubble is
        (depth - 1)(F + B - W) for W <= F (table 1), where 1F1B's is (depth - 1)(F + B + W).
        """
        for batch in pipeline.batch_range():
            waiting: list[int] = []
            for k, forward in alternate(
                pipeline.microbatches_of(worker, batch), pipeline.in_flight_limit(worker.stage)
            ):
                if forward:
                    yield Forward(k, batch)
                    continue
                yield BackwardInput(k, batch)
                waiting.append(k)
                if len(waiting) > worker.stage:
                    yield BackwardWeight((waiting.pop(0),), batch)
            yield from (BackwardWeight((k,), batch) for k in waiting)
            yield Update(batch + 1)

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """The depth, from forward to BackwardWeight: on every stage as many as 1F1B keeps on the first."""
        del stage
        return min(depth, microbatches)
