"""Interleaved 1F1B with a flush (Narayanan et al., Efficient Large-Scale Language Model Training, 2021, section 2.2).

A rank holds several chunks of the model, each a stage: with 2 ranks and 2 chunks rank 0 has the stages 0 and 2. F1.1
is the forward of microbatch 1 through chunk 1.

rank 0   F1.0 F2.0 F1.1 F2.1      B1.1 F3.0 ...
rank 1        F1.0 F2.0 F1.1 B1.1 F2.1 B2.1 ...
"""

from collections.abc import Iterator

from pipeplan.documents.plan import Worker
from pipeplan.errors import require
from pipeplan.programs.instructions import Backward, Forward, Instruction, Update
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.one_f_one_b import alternate


class Interleaved(Schedule):
    """1F1B over microbatches and chunks."""

    name = "1f1b-interleaved"
    source = "Narayanan et al. 2021, section 2.2"
    alternates = True
    flushes = True
    chunked = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """1F1B over (microbatch, chunk): as many microbatches as there are ranks through a chunk, then the next chunk.

        Batch t runs on version t. With F and B seconds for all chunks of a rank the bubble is
        (ranks - 1)(F + B) / chunks, a share of (ranks - 1) / (microbatches chunks) of the work. Raises
        InvalidInputError unless the microbatches are a multiple of the ranks, and for several chunks on one rank: it
        does not send to itself.
        """
        span, chunks = pipeline.span, pipeline.chunks
        require(
            span > 1 or chunks == 1, "chunks", f"must leave at least 2 ranks to the {pipeline.depth} stages", chunks
        )
        rule = f"must be a multiple of the ranks in a pipeline ({span}) for 1f1b-interleaved"
        require(pipeline.microbatches % span == 0, "microbatches", rule, pipeline.microbatches)
        ahead = 2 * (span - 1 - worker.stage) + (chunks - 1) * span + 1
        for batch in pipeline.batch_range():
            numbers = pipeline.microbatches_of(worker, batch)
            for turn, forward in alternate(range(len(numbers) * chunks), min(ahead, len(numbers) * chunks)):
                rounds, chunk = divmod(turn // span, chunks)
                k = numbers[rounds * span + turn % span]
                yield Forward(k, batch, chunk) if forward else Backward(k, batch, chunks - 1 - chunk)
            yield from (Update(batch + 1, chunk) for chunk in range(chunks))

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """Of ranks with one stage each: twice as many as there are stages after this one, and one."""
        return min(2 * (depth - 1 - stage) + 1, microbatches)

    def takes(self, *, ranks: int, chunks: int, microbatches: int) -> bool:
        """Groups of as many microbatches as ranks take turns; one rank with several chunks would send to itself."""
        return microbatches % ranks == 0 and (ranks > 1 or chunks == 1)

    def idle_steps(self, *, ranks: int, chunks: int) -> float:
        """It fills and drains in microbatches of one chunk: `compute` has the picture."""
        return (ranks - 1) / chunks
