"""Pipeline: the shape for which a schedule is generated, and the numbers of the microbatches in it."""

from dataclasses import dataclass
from math import lcm

from pipeplan.documents.plan import Plan, Worker
from pipeplan.errors import require, require_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages with their replicas, and the batches [first_batch, first_batch + batches) that pass through them.

    `microbatches` counts those of a batch on one replica of the whole pipeline. Where the stages' replicas differ
    (PipeDream 2018, section 3.3), a batch is the smallest number of minibatches that every stage's replicas share
    evenly, times `microbatches`.

    With `chunks` above 1 a rank holds several stages (Narayanan et al. 2021, virtual pipeline stages): the worker of
    stage s < `span` has the stages s, s + span, s + 2 span, ... as its chunks 0, 1, 2, ..., and stands for all of them.
    Where the pipeline is `v_shaped` (Qi et al. 2024), it has the stages s and depth - 1 - s: the last rank has two
    stages in a row, and the first rank has the first stage and the last.

    `recompute` says which stages keep inputs and run their forward again, `recompute_units` how much of it at a time
    (`documents.plan.RECOMPUTE_UNITS`; none: the whole stage).
    """

    replicas: tuple[int, ...]
    microbatches: int
    batches: int = 1
    first_batch: int = 0
    recompute: tuple[bool, ...] = ()
    chunks: int = 1
    v_shaped: bool = False
    recompute_units: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.replicas) > 0, "stages", "must be at least 1", len(self.replicas))
        for replicas in self.replicas:
            require_count("replicas", replicas)
        require_count("microbatches", self.microbatches)
        require_count("batches", self.batches)
        require_count("first_batch", self.first_batch, at_least=0)
        rule = f"must name each of the {self.depth} stages, or none"
        for field in ("recompute", "recompute_units"):
            require(len(getattr(self, field)) in (0, self.depth), field, rule, getattr(self, field))
        require_count("chunks", self.chunks)
        require(self.depth % self.chunks == 0, "chunks", f"must divide the {self.depth} stages", self.chunks)
        require(not self.v_shaped or self.chunks == 2, "chunks", "must be 2 in a V", self.chunks)

    @property
    def depth(self) -> int:
        """The number of stages."""
        return len(self.replicas)

    @property
    def span(self) -> int:
        """The ranks of one whole pipeline."""
        return self.depth // self.chunks

    def stage_of(self, first_stage: int, chunk: int) -> int:
        """The stage that is this chunk of the rank whose chunk 0 is `first_stage`."""
        if self.v_shaped and chunk == 1:
            return self.depth - 1 - first_stage
        return first_stage + chunk * self.span

    def place_of(self, stage: int) -> tuple[int, int]:
        """Of the rank that has this stage: the stage that is its chunk 0, and the chunk that is this stage."""
        chunk = stage // self.span
        if self.v_shaped and chunk == 1:
            return self.depth - 1 - stage, chunk
        return stage % self.span, chunk

    @property
    def batch_microbatches(self) -> int:
        """A batch's microbatches over all replicas."""
        return self.microbatches * lcm(*self.replicas)

    def recomputes(self, stage: int) -> bool:
        """Whether this stage keeps inputs only and runs its forward again."""
        return bool(self.recompute) and self.recompute[stage]

    def recomputes_by_block(self, stage: int) -> bool:
        """Whether its backward runs one block's forward again after the other."""
        return self.recomputes(stage) and bool(self.recompute_units) and self.recompute_units[stage] != "stage"

    def microbatches_of(self, worker: Worker, batch: int) -> range:
        """The numbers of the batch's microbatches that this worker computes: round robin over the replicas."""
        first = batch * self.batch_microbatches + 1
        return range(first + worker.replica, first + self.batch_microbatches, self.replicas[worker.stage])

    def numbers_of(self, worker: Worker) -> range:
        """The same of all batches, which follow each other."""
        batch, stop = self.batch_microbatches, self.first_batch + self.batches
        return range(self.first_batch * batch + 1 + worker.replica, stop * batch + 1, self.replicas[worker.stage])

    def batch_of(self, microbatch: int) -> int:
        """The batch (from 0) that holds the microbatch (from 1)."""
        return (microbatch - 1) // self.batch_microbatches

    def in_flight_limit(self, stage: int) -> int:
        """A worker's microbatches in flight under 1F1B: ceil(workers from this stage on / replicas).

        That is depth - stage in a straight pipeline and NOAM on the input stage (PipeDream 2018, section 3.3).
        """
        return -(-sum(self.replicas[stage:]) // self.replicas[stage])

    def batch_range(self) -> range:
        """The batches that pass through."""
        return range(self.first_batch, self.first_batch + self.batches)


def pipeline_of(plan: Plan, *, batches: int, first_batch: int = 0) -> Pipeline:
    """The plan's shape."""
    return Pipeline(
        replicas=plan.replicas,
        microbatches=plan.microbatches,
        batches=batches,
        first_batch=first_batch,
        recompute=tuple(stage.recompute for stage in plan.stages),
        recompute_units=tuple(stage.recompute_unit for stage in plan.stages),
        chunks=plan.chunks,
    )


def ends_with_checkpoint(pipeline: Pipeline, batches_done: int, every: int) -> bool:
    """Whether a checkpoint follows this many batches of training, if one follows every `every` batches (0: never)."""
    return every > 0 and (batches_done % every == 0 or batches_done == pipeline.batch_range().stop)
