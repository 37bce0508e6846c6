"""Program: a schedule's streams, one a worker, by rank. Plan in, streams out; nothing else decides what runs when."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from planner_service.core.errors import require
from planner_service.core.plan import ASP, INTERLEAVED, SCHEDULES, STASHING, VERTICAL_SYNC, Worker
from planner_service.core.schedule.communicate import communicate
from planner_service.core.schedule.data_parallel import data_parallel, data_parallel_asp
from planner_service.core.schedule.gpipe import gpipe
from planner_service.core.schedule.instructions import (
    Backward,
    BackwardInput,
    Checkpoint,
    Instruction,
    Recompute,
    Update,
)
from planner_service.core.schedule.interleaved import interleaved
from planner_service.core.schedule.naive import naive
from planner_service.core.schedule.one_f_one_b import one_f_one_b
from planner_service.core.schedule.pipedream import pipedream, pipedream_vertical_sync
from planner_service.core.schedule.pipeline import Pipeline
from planner_service.core.schedule.repeating import instructions_of
from planner_service.core.schedule.two_bw import two_bw
from planner_service.core.schedule.zb_h1 import zb_h1

Generator = Callable[[Pipeline, Worker], Iterator[Instruction]]
"""A schedule: the compute and the updates of one worker, in order. Pure."""

GENERATORS: dict[str, Generator] = {
    "naive": naive,
    "data-parallel": data_parallel,
    ASP: data_parallel_asp,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "pipedream": pipedream,
    "pipedream-2bw": two_bw,
    VERTICAL_SYNC: pipedream_vertical_sync,
    "zb-h1": zb_h1,
    INTERLEAVED: interleaved,
}
FUSED = frozenset({"naive", "data-parallel", "gpipe", "1f1b"})
"""The schedules that empty the pipeline between batches and leave the backward whole."""

FLUSHES = FUSED | {"zb-h1", INTERLEAVED}
"""The schedules that empty the pipeline between batches, so that every update is a plain one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one rank executes, in order. `stage` is that of its chunk 0: the only one, for most schedules."""

    rank: int
    stage: int
    replica: int
    instructions: Sequence[Instruction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All workers' streams, by rank."""

    schedule: str
    pipeline: Pipeline
    streams: tuple[Stream, ...]

    def stage_streams(self, stream: Stream) -> tuple[Stream, ...]:
        """A rank's stream as one stream for each of its stages, by chunk: what each holds and computes by itself."""
        if self.pipeline.chunks == 1:
            return (stream,)
        return tuple(
            replace(
                stream,
                stage=self.pipeline.stage_of(stream.stage, chunk),
                instructions=instructions_of(stream.instructions, chunk),
            )
            for chunk in range(self.pipeline.chunks)
        )


def build(schedule: str, pipeline: Pipeline, placement: Sequence[Worker] = (), *, checkpoint_every: int = 0) -> Program:
    """Generates the streams of a schedule for a pipeline.

    `placement` lists the workers by rank (default: pipeline after pipeline, stage by stage). With
    `checkpoint_every` n, every stage writes a checkpoint after each n-th batch and after the
    last. Raises InvalidInputError for a schedule that does not exist or does not fit the pipeline.
    """
    require(schedule in GENERATORS, "schedule", f"must be one of {', '.join(SCHEDULES)}", schedule)
    equal = len(set(pipeline.replicas)) == 1
    rule = f"must be the same on every stage for {schedule}"
    require(equal or schedule in STASHING, "replicas", rule, pipeline.replicas)
    rule = f"must be 1 for {schedule}, in which a rank has one stage"
    require(pipeline.chunks == 1 or schedule == INTERLEAVED, "chunks", rule, pipeline.chunks)
    workers = tuple(placement) or pipelines_in_a_row(pipeline.replicas[: pipeline.span])
    ranks = {worker: rank for rank, worker in enumerate(workers)}

    def stream(rank: int, worker: Worker) -> Stream:
        compute = GENERATORS[schedule](pipeline, worker)
        if any(pipeline.recompute):
            compute = _recompute(compute, pipeline, worker.stage)
        if checkpoint_every:
            compute = checkpoint(compute, schedule, pipeline, worker.stage, checkpoint_every)
        instructions = tuple(communicate(compute, pipeline, worker, ranks, in_turn=schedule == ASP))
        return Stream(rank=rank, stage=worker.stage, replica=worker.replica, instructions=instructions)

    return Program(
        schedule=schedule,
        pipeline=pipeline,
        streams=tuple(stream(rank, worker) for rank, worker in enumerate(workers)),
    )


def pipelines_in_a_row(replicas: Sequence[int]) -> tuple[Worker, ...]:
    """The placement that numbers replica 0 of every stage first, then replica 1, and so on."""
    rounds = range(max(replicas))
    return tuple(
        Worker(stage=stage, replica=replica)
        for replica in rounds
        for stage, count in enumerate(replicas)
        if replica < count
    )


def stages_in_a_row(replicas: Sequence[int]) -> tuple[Worker, ...]:
    """The placement that numbers all replicas of stage 0 first, then those of stage 1, and so on."""
    return tuple(
        Worker(stage=stage, replica=replica) for stage, count in enumerate(replicas) for replica in range(count)
    )


def versions_behind(schedule: str, pipeline: Pipeline, stage: int) -> int:
    """How many updates behind the newest weights a stage may compute: 0 with a flush.

    With vertical sync the input stage has NOAM minibatches in flight on each of its r1 replicas; of these NOAM r1
    minibatches, a version of r replicas holds at least gcd(r1, r): all but those are missing, r an update.
    """
    if schedule == VERTICAL_SYNC:
        first, own = pipeline.replicas[0], pipeline.replicas[stage]
        return -(-(pipeline.in_flight_limit(0) * first - gcd(first, own)) // own)
    if schedule == "pipedream":
        return pipeline.in_flight_limit(stage) - 1
    if schedule == ASP:
        return pipeline.replicas[stage] - 1
    return 1 if schedule == "pipedream-2bw" else 0


def updates_a_batch(schedule: str, pipeline: Pipeline, stage: int) -> int:
    """Weight versions that a batch makes on a stage: one; for PipeDream one a minibatch of each replica, for ASP one a
    replica.
    """
    if schedule == ASP:
        return pipeline.replicas[stage]
    return pipeline.batch_microbatches // pipeline.replicas[stage] if schedule in STASHING else 1


def _recompute(instructions: Iterable[Instruction], pipeline: Pipeline, first_stage: int) -> Iterator[Instruction]:
    recomputes = [pipeline.recomputes(pipeline.stage_of(first_stage, chunk)) for chunk in range(pipeline.chunks)]
    for instruction in instructions:
        if isinstance(instruction, Backward | BackwardInput) and recomputes[instruction.chunk]:
            yield Recompute(instruction.microbatch, instruction.version, instruction.chunk)
        yield instruction


def checkpoint(
    instructions: Iterable[Instruction], schedule: str, pipeline: Pipeline, stage: int, every: int
) -> Iterator[Instruction]:
    """Adds a checkpoint after each `every`-th batch, and after the pipeline's last, behind its last update."""
    updates = updates_a_batch(schedule, pipeline, stage)
    behind = versions_behind(schedule, pipeline, stage)
    for instruction in instructions:
        yield instruction
        if isinstance(instruction, Update) and instruction.version % updates == 0:
            batches_done = instruction.version // updates
            if ends_with_checkpoint(pipeline, batches_done, every):
                yield Checkpoint(instruction.version, max(instruction.version - behind, 0), instruction.chunk)


def ends_with_checkpoint(pipeline: Pipeline, batches_done: int, every: int) -> bool:
    """Whether a checkpoint is written after so many batches since training's start, `every` so many (0: never)."""
    return every > 0 and (batches_done % every == 0 or batches_done == pipeline.batch_range().stop)
