"""Registry: all schedules by name, and the program that one makes for a pipeline.

Pipeline and placement in, one stream a worker out: nothing else decides what runs when.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from pipeplan.documents.plan import ASP, INTERLEAVED, SCHEDULES, STASHING, VERTICAL_SYNC, Worker
from pipeplan.errors import require
from pipeplan.programs.communicate import communicate
from pipeplan.programs.instructions import Backward, BackwardInput, Instruction, Recompute
from pipeplan.programs.pipeline import Pipeline, checkpoint
from pipeplan.programs.program import Program, Stream, pipelines_in_a_row
from pipeplan.schedules.data_parallel import data_parallel, data_parallel_asp
from pipeplan.schedules.gpipe import gpipe
from pipeplan.schedules.interleaved import interleaved
from pipeplan.schedules.naive import naive
from pipeplan.schedules.one_f_one_b import one_f_one_b
from pipeplan.schedules.pipedream import pipedream, pipedream_vertical_sync
from pipeplan.schedules.two_bw import two_bw
from pipeplan.schedules.zb_h1 import zb_h1

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


def build(schedule: str, pipeline: Pipeline, placement: Sequence[Worker] = (), *, checkpoint_every: int = 0) -> Program:
    """Generates the streams of a schedule for a pipeline.

    `placement` lists the workers by rank (default: pipeline after pipeline, stage by stage). With `checkpoint_every` n,
    every stage writes a checkpoint after each n-th batch and after the last. Raises InvalidInputError for a schedule
    that does not exist or does not fit the pipeline.
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


def _recompute(instructions: Iterable[Instruction], pipeline: Pipeline, first_stage: int) -> Iterator[Instruction]:
    """The pass that runs the forward again right before each backward, on the stages that recompute."""
    recomputes = [pipeline.recomputes(pipeline.stage_of(first_stage, chunk)) for chunk in range(pipeline.chunks)]
    for instruction in instructions:
        if isinstance(instruction, Backward | BackwardInput) and recomputes[instruction.chunk]:
            yield Recompute(instruction.microbatch, instruction.version, instruction.chunk)
        yield instruction
