"""PipeDream-2BW (2021, section 3.1): 1F1B without a flush, an update a batch, two weight versions.

stage 0   F1 F2       B1 F3 B2 U1 F4 B3 F5@1 B4 U2 ...
stage 1      F1    B1 F2 B2 U1 F3 B3 F4 B4 U2 F5@1 ...
"""

from collections.abc import Iterator, Sequence

from pipeplan.documents.plan import Worker
from pipeplan.errors import require
from pipeplan.programs.instructions import Instruction, Update, backward, forward
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.one_f_one_b import alternate


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
        last = {pipeline.microbatches_of(worker, batch)[-1]: batch for batch in pipeline.batch_range()}
        numbers = [k for batch in pipeline.batch_range() for k in pipeline.microbatches_of(worker, batch)]
        a_batch = pipeline.batch_microbatches
        for k, there in alternate(numbers, pipeline.in_flight_limit(worker.stage)):
            version = max((k - 1) // a_batch - 1, 0)
            yield forward(k, version) if there else backward(k, version)
            if not there and k in last:
                yield Update(last[k] + 1)

    def versions_behind(self, pipeline: Pipeline, stage: int) -> int:
        """One: the version before the newest."""
        del pipeline, stage
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
        """If others are in flight.

        With several replicas, the update is delayed until only those need the old version.
        """
        return sum(replicas[stage:]) > replicas[stage] or replicas[stage] == 1
