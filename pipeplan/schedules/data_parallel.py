"""Data parallelism: every replica holds the whole model.

BSP: gradients are averaged once a batch.

replica 0   F1 B1 F3 B3 G1 U1
replica 1   F2 B2 F4 B4 G1 U1

ASP: every replica's gradients are an update of their own, and no replica waits for gradients that are still being
computed.

replica 0   F1 B1 U1       F4@1 B4 U2 U3 U4 F7@4 ...
replica 1   F2 B2 U1 U2    F5@2 B5 U3 U4 U5 ...
replica 2   F3 B3 U1 U2 U3 F6@3 B6 U4 U5 U6 ...
"""

from collections.abc import Iterator, Sequence

from pipeplan.documents.plan import Worker
from pipeplan.errors import require
from pipeplan.programs.instructions import Backward, Forward, Instruction, Update
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.naive import Naive


class DataParallel(Naive):
    """BSP: the naive order on a single stage, gradients averaged once a batch."""

    name = "data-parallel"
    source = "PipeDream 2018, section 2"
    single_stage = True

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """The naive order. Raises InvalidInputError for more than one stage."""
        require(pipeline.depth == 1, "stages", "must be 1 for data-parallel", pipeline.depth)
        return super().compute(pipeline, worker)


class DataParallelASP(Schedule):
    """ASP: every replica's gradients are an update of their own."""

    name = "data-parallel-asp"
    source = "PipeDream 2018, sections 2 and 5"
    alternates = True
    pipelined = False
    single_stage = True
    update = "replica"

    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """ASP (PipeDream 2018, sections 2 and 5) of workers that are equally fast: their updates come in turn.

        Each computes on the newest weights that there are when it starts, which miss the gradients that the other r - 1
        are computing: w(k) = w(k - 1) - lr grad f_k(w(k - r)). A replica's share of a batch is one minibatch, and a
        batch makes an update a replica. All make every update, in the same order, and a version is the same everywhere.
        Raises InvalidInputError for more than one stage.
        """
        require(pipeline.depth == 1, "stages", "must be 1 for data-parallel-asp", pipeline.depth)
        replicas, batches = pipeline.replicas[0], pipeline.batch_range()
        newest = batches.start * replicas
        for batch in batches:
            own = batch * replicas + worker.replica + 1
            version = max(own - replicas, 0)
            for k in pipeline.microbatches_of(worker, batch):
                yield Forward(k, version)
                yield Backward(k, version)
            yield from (Update(made) for made in range(newest + 1, own + 1))
            newest = own
        yield from (Update(made) for made in range(newest + 1, batches.stop * replicas + 1))

    def versions_behind(self, pipeline: Pipeline, stage: int) -> int:
        """The number of other replicas, whose updates may be missing."""
        return pipeline.replicas[stage] - 1

    def updates_late(self, pipeline: Pipeline) -> int:
        """Those of the other replicas."""
        return self.versions_behind(pipeline, 0)

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """One: microbatches run one at a time."""
        del depth, stage, microbatches
        return 1

    def weight_versions(self, held: int) -> int:
        """One: the newest, on which the next microbatch is computed."""
        del held
        return 1

    def keeps_versions(self, replicas: Sequence[int], stage: int) -> bool:
        """Never: nothing is in flight when a replica updates."""
        del replicas, stage
        return False
