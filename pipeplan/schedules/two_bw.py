"""PipeDream-2BW (2021, section 3.1): 1F1B without a flush, an update a batch, two weight versions.

stage 0   F1 F2       B1 F3 B2 U1 F4 B3 F5@1 B4 U2 ...
stage 1      F1    B1 F2 B2 U1 F3 B3 F4 B4 U2 F5@1 ...
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

from pipeplan.documents.plan import Worker
from pipeplan.errors import require
from pipeplan.programs.instructions import Instruction, Update, backward, forward
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.one_f_one_b import Block, alternating


class TwoBW(Schedule):
    """1F1B without a flush, an update a batch, two weight versions."""

    name = "pipedream-2bw"
    source = "PipeDream-2BW 2021, section 3.1"
    alternates = True
    fills = True
    microbatch_a_stage = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """Batch t (from 0) runs on version max(t - 1, 0) on every stage: W(t+1) = W(t) - lr grad f(W(t-1)).

        In the paper's numbering microbatch k uses version max(floor((k-1)/m) - 1, 0). Raises InvalidInputError unless
        m >= depth, without which a version would be needed before it is made.
        """
        rule = f"must be at least the number of stages ({pipeline.depth}) for pipedream-2bw"
        require(pipeline.microbatches >= pipeline.depth, "microbatches", rule, pipeline.microbatches)
        numbers = tuple(pipeline.microbatches_of(worker, batch) for batch in pipeline.batch_range())
        limit = pipeline.in_flight_limit(worker.stage)
        return chain.from_iterable(alternating(*_both(numbers, pipeline.first_batch), limit))

    def versions_behind(self, pipeline: Pipeline, stage: int) -> int:
        """One: the version before the newest."""
        del pipeline, stage
        return 1

    def updates_late(self, pipeline: Pipeline) -> int:
        """One, on a single stage as well."""
        del pipeline
        return 1

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """As many as there are stages from this one on (PipeDream 2018, section 3.3)."""
        del microbatches
        return depth - stage

    def weight_versions(self, held: int) -> int:
        """Two: the weights are double-buffered."""
        del held
        return 2

    def keeps_versions(self, replicas: Sequence[int], stage: int) -> bool:
        """If other microbatches are in flight.

        With several replicas, the update is delayed until only those need the old version.
        """
        return sum(replicas[stage:]) > replicas[stage] or replicas[stage] == 1


@lru_cache(maxsize=16)
def _both(numbers: tuple[range, ...], first_batch: int) -> tuple[Sequence[Block], Sequence[Block]]:
    """The forwards and the backwards of the batches of a worker, which all stages share."""
    forwards, backwards = list[Block](), list[Block]()
    for batch, of_batch in enumerate(numbers, first_batch):
        version = max(batch - 1, 0)
        forwards += [(forward(k, version),) for k in of_batch]
        backwards += [(backward(k, version),) for k in of_batch]
        backwards[-1] += (Update(batch + 1),)
    return forwards, backwards
