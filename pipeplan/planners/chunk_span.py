"""Chunk span: what a rank of several stages computes between its first backward and its last forward of a batch."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from pipeplan.costs.memory import chunked_pipeline
from pipeplan.documents.plan import Worker
from pipeplan.programs.instructions import Backward, Forward
from pipeplan.programs.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A rank's compute in a batch, after its first backward and up to its last forward: the chunks of these two, and by
    chunk the forwards and the backwards. A batch of more whole rounds has as many more of each as it has microbatches.
    """

    first: int
    last: int
    counts: tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def span_of(laws: Schedule, span: int, chunks: int, rank: int, microbatches: int) -> ChunkSpan | None:
    """A rank's span in a batch; None if its last forward comes before its first backward."""
    pipeline = chunked_pipeline(laws, ranks=span, chunks=chunks, microbatches=microbatches)
    computed = [i for i in laws.compute(pipeline, Worker(stage=rank, replica=0)) if isinstance(i, Forward | Backward)]
    backward = next(index for index, each in enumerate(computed) if isinstance(each, Backward))
    forward = max(index for index, each in enumerate(computed) if isinstance(each, Forward))
    if forward < backward:
        return None
    counted = Counter((isinstance(each, Forward), each.chunk) for each in computed[backward + 1 : forward + 1])
    counts = tuple((counted[True, chunk], counted[False, chunk]) for chunk in range(chunks))
    return ChunkSpan(computed[backward].chunk, computed[forward].chunk, counts)
