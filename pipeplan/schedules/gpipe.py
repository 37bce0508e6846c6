"""GPipe (Huang et al. 2019, section 2.3): all forwards of a batch, then all backwards in reverse, then one update.

stage 0   F1 F2 F3          B3 B2 B1 U1
stage 1      F1 F2 F3    B3 B2 B1 U1
stage 2         F1 F2 F3 B3 B2 B1 U1
"""

from collections.abc import Iterator

from pipeplan.documents.plan import Worker
from pipeplan.programs.instructions import Instruction, Update, backward, forward
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule


class GPipe(Schedule):
    """All forwards of a batch, then all backwards in reverse, then one update."""

    name = "gpipe"
    source = "Huang et al. 2019, section 2.3"
    fills = True
    keeps_batch = True
    flushes = True
    recomputes = True
    minibatch_statistics = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Batch t runs on version t; the pipeline is empty between batches."""
        for batch in pipeline.batch_range():
            numbers = pipeline.microbatches_of(worker, batch)
            yield from (forward(k, batch) for k in numbers)
            yield from (backward(k, batch) for k in reversed(numbers))
            yield Update(batch + 1)

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """The microbatches of the whole batch."""
        del depth, stage
        return microbatches

    def gathers_beside(self, *, held: int, microbatches: int) -> bool:
        """No: all forwards come first."""
        del held, microbatches
        return False
