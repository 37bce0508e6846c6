"""Schedule: a generator of a worker's compute, with the laws that all other code reads.

A schedule is a class with a name, a generator and laws. No other code compares schedules by name. The check tests
streams by the laws, cost models count by them, and passes and planners read from them what is allowed. The schedules
are in `pipeplan.schedules`; docs/schedules.md shows how to write another one.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import ClassVar, Literal

from pipeplan.documents.plan import Worker
from pipeplan.errors import InvalidInputError, require
from pipeplan.programs.instructions import Backward, BackwardWeight, Forward, Instruction, microbatches_of
from pipeplan.programs.pipeline import Pipeline

MOST_COUNTED = 2**14
"""Upper bound on a batch's microbatches for counting a stage's memory in its stream: some milliseconds a stage."""

UPDATES_LATE = "whose gradients are of older weights: it does not train as one process does"
"""The reason, after the name of a schedule or planner, why `Options.synchronous` excludes it."""


class Schedule(ABC):
    """One pipeline schedule. Pure: equal pipelines give equal streams.

    A law that a subclass does not state has a safe default: `programs.check` refuses a stream that needs more than the
    default (`versions_behind`), the default counts more than may be needed (`weight_versions`), or it assumes less
    (`fills`).
    """

    name: ClassVar[str]
    """Its name in plans, commands and the API: at most 32 characters."""

    source: ClassVar[str]
    """The paper and its section."""

    # Laws of its streams.

    flushes: ClassVar[bool] = False
    """The pipeline is empty between batches: batch t runs on version t, the newest one, on every stage."""

    update: ClassVar[Literal["batch", "minibatch", "replica"]] = "batch"
    """When a stage makes a new version of its weights.

    - "batch": after all microbatches of a batch, on all stages and replicas together.
    - "minibatch": after one microbatch of each of the stage's replicas; stages may then have different numbers of
      replicas (PipeDream, which calls its undivided microbatches minibatches).
    - "replica": after one replica's part of a batch, one replica after the other (asynchronous data parallelism).
    """

    vertical_sync: ClassVar[bool] = False
    """A microbatch runs on every stage on the version that it has on the input stage (PipeDream 2018, section 3.3)."""

    splits_backward: ClassVar[bool] = False
    """It places the gradients of inputs and of weights by itself (`BackwardInput`, `BackwardWeight`)."""

    alternates: ClassVar[bool] = False
    """On the last stage each backward follows the forward of its own microbatch."""

    # What it runs on.

    single_stage: ClassVar[bool] = False
    """Every worker holds the whole model."""

    chunked: ClassVar[bool] = False
    """A rank may hold several stages, its chunks (Narayanan et al. 2021)."""

    v_shaped: ClassVar[bool] = False
    """Its ranks hold two chunks in a V (Qi et al. 2024): of p ranks rank r has the stages r and 2p - 1 - r."""

    microbatch_a_stage: ClassVar[bool] = False
    """A batch must have at least as many microbatches as there are stages."""

    # What planners may assume.

    pipelined: ClassVar[bool] = True
    """Several microbatches are in the pipeline at once."""

    fills: ClassVar[bool] = False
    """Stage s of d has at least min(d - s, microbatches) in flight: a bound that planners use before they count."""

    keeps_batch: ClassVar[bool] = False
    """Every stage keeps the whole batch in flight."""

    # Its defaults.

    recomputes: ClassVar[bool] = False
    """Planners recompute all stages, unless the options forbid it."""

    minibatch_statistics: ClassVar[bool] = False
    """Batch norm tracks whole minibatches."""

    fills_gaps: ClassVar[bool] = False
    """2BP places the weights' gradients in its idle gaps; in other schedules all at the end of a batch."""

    zero_bubble: ClassVar[str | None] = None
    """The name of the schedule of the same order that splits the backward itself; the planner auto tries it too."""

    @abstractmethod
    def compute(self, pipeline: Pipeline, worker: Worker) -> Iterator[Instruction]:
        """The forwards, backwards and updates of one worker, in the order in which it executes them.

        Raises InvalidInputError for a pipeline that the schedule does not fit.
        """

    def versions_behind(self, pipeline: Pipeline, stage: int) -> int:
        """Upper bound on the updates by which a stage's weights lag behind the newest."""
        del pipeline, stage
        return 0

    def updates_late(self, pipeline: Pipeline) -> int:
        """Upper bound on a gradient's lateness: the number of updates before its own that its weights lack.

        With 0 on all stages the updates are those of one process that trains on the same batches. Zero with a flush:
        `programs.check` refuses anything else. Otherwise counted in the streams of a few batches, by the version that
        each forward names.
        """
        if self.flushes:
            return 0
        short = min(pipeline.microbatches, MOST_COUNTED)
        return _counted_late(self, pipeline.replicas, short, pipeline.chunks, pipeline.v_shaped)

    @property
    def synchronous(self) -> bool:
        """Whether no gradient is late on two stages, or two replicas of a single one: planners leave others out.

        Yes where that cannot be counted; the plan is then checked.
        """
        stages = 1 if self.single_stage else 2
        try:
            return not self.updates_late(Pipeline(replicas=(2,) * stages, microbatches=4))
        except InvalidInputError:
            return True

    def updates_a_batch(self, pipeline: Pipeline, stage: int) -> int:
        """Weight versions that a batch makes on a stage."""
        match self.update:
            case "batch":
                return 1
            case "minibatch":
                return pipeline.batch_microbatches // pipeline.replicas[stage]
            case "replica":
                return pipeline.replicas[stage]

    def in_flight(self, *, depth: int, stage: int, microbatches: int) -> int:
        """Upper bound on a stage's microbatches, from forward to the whole backward; all stages have equal replicas.

        Counted in the stream, unless the schedule has a formula. Raises InvalidInputError for a batch that is too long
        to be counted.
        """
        rule = f"must be at most {MOST_COUNTED} a batch for {self.name}, which has no formula for in_flight"
        require(microbatches <= MOST_COUNTED, "microbatches", rule, microbatches)
        return _counted(self, depth, stage, microbatches)

    def takes(self, *, ranks: int, chunks: int, microbatches: int) -> bool:
        """Whether a batch of this many microbatches runs on this many ranks with this many stages each.

        Planners call this for `chunked` schedules; `compute` raises if the answer is no.
        """
        return not self.microbatch_a_stage or microbatches >= ranks * chunks

    def idle_steps(self, *, ranks: int, chunks: int) -> float:
        """A rank's idle time in a batch with equal stages, in steps; a step is its seconds for one microbatch.

        Planners count it for schedules with a flush that are `chunked`.
        """
        del chunks
        return ranks - 1.0

    def paper_in_flight(self, *, depth: int, microbatches: int) -> int:
        """PipeDream-2BW's closed form (2021, appendix A.1.2) takes stage 0's microbatches in flight on every stage."""
        return self.in_flight(depth=depth, stage=0, microbatches=microbatches)

    def weight_versions(self, held: int) -> int:
        """Weight versions alive on a stage with `held` microbatches in flight: one with a flush, or one for each."""
        return 1 if self.flushes else held

    def gathers_beside(self, *, held: int, microbatches: int) -> bool:
        """Whether a stage may have gradients while it keeps `held` microbatches, its maximum.

        No, where it reaches the maximum only before the first backward after an update.
        """
        del held, microbatches
        return True

    def keeps_versions(self, replicas: Sequence[int], stage: int) -> bool:
        """Whether a stage copies its weights when it updates: microbatches in flight there still need the old version.

        `replicas` are those of all stages.
        """
        del replicas, stage
        return not self.flushes

    @property
    def takes_two_bp(self) -> bool:
        """Whether 2BP may split its backward: p2 can wait for the end of the batch, which only a flush provides."""
        return self.flushes and not self.splits_backward and not self.chunked

    def __repr__(self) -> str:
        return f"<schedule {self.name}>"


@lru_cache(maxsize=4096)
def _counted(schedule: Schedule, depth: int, stage: int, microbatches: int) -> int:
    """A stage's maximum in a stream of a few batches: enough to fill a pipeline that never empties."""
    batches = 1 if schedule.flushes else 2 - (-depth // microbatches)
    pipeline = Pipeline(replicas=(1,) * depth, microbatches=microbatches, batches=batches)
    held, most = set[int](), 0
    for instruction in schedule.compute(pipeline, Worker(stage=stage)):
        match instruction:
            case Forward(microbatch=k):
                held.add(k)
                most = max(most, len(held))
            case Backward() | BackwardWeight():
                held.difference_update(microbatches_of(instruction))
            case _:
                pass
    return most


@lru_cache(maxsize=4096)
def _counted_late(schedule: Schedule, replicas: tuple[int, ...], microbatches: int, chunks: int, v_shaped: bool) -> int:
    """The maximum number of updates, before that of its gradient, that a forward's version lacks."""
    batches = 2 + 2 * -(-sum(replicas) // microbatches)
    pipeline = Pipeline(replicas=replicas, microbatches=microbatches, batches=batches, chunks=chunks, v_shaped=v_shaped)
    late = 0
    for first in range(pipeline.span):
        for replica in range(replicas[first]):
            for instruction in schedule.compute(pipeline, Worker(stage=first, replica=replica)):
                if isinstance(instruction, Forward):
                    batch, number = pipeline.batch_of(instruction.microbatch), instruction.microbatch - 1
                    replicas_before = batch * replicas[first] + replica
                    before = {"batch": batch, "minibatch": number // replicas[first], "replica": replicas_before}
                    late = max(late, before[schedule.update] - instruction.version)
    return late
