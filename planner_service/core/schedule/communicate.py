"""The communication pass: adds what moves between the stages, and between a stage's replicas."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from planner_service.core.plan import Worker
from planner_service.core.schedule.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    Update,
)
from planner_service.core.schedule.pipeline import Pipeline

_BACKWARD = (Backward, BackwardInput)


def communicate(
    instructions: Iterable[Instruction],
    pipeline: Pipeline,
    worker: Worker,
    ranks: Mapping[Worker, int],
    *,
    in_turn: bool = False,
) -> Iterator[Instruction]:
    """Receives stand right before the compute that needs them, sends right after the compute that makes them.

    The peer of a microbatch is the replica of the neighbouring stage that computes it, in both directions. A version is
    made from the gradients of all replicas, or, `in_turn`, from those of one replica after the other.
    """
    stages = [pipeline.stage_of(worker.stage, chunk) for chunk in range(pipeline.chunks)]
    neighbours = [(_ranks(pipeline, stage - 1, ranks), _ranks(pipeline, stage + 1, ranks)) for stage in stages]
    replicated = pipeline.replicas[worker.stage] > 1
    chunk, (before, after), several = 0, neighbours[0], pipeline.chunks > 1
    for instruction in instructions:
        if several:
            chunk = instruction.chunk
            before, after = neighbours[chunk]
        if isinstance(instruction, Forward):
            k = instruction.microbatch
            if before:
                yield RecvActivation(k, before[(k - 1) % len(before)], chunk)
            yield instruction
            if after:
                yield SendActivation(k, after[(k - 1) % len(after)], chunk)
        elif isinstance(instruction, _BACKWARD):
            k = instruction.microbatch
            if after:
                yield RecvGradient(k, after[(k - 1) % len(after)], chunk)
            yield instruction
            if before:
                yield SendGradient(k, before[(k - 1) % len(before)], chunk)
        else:
            if replicated and isinstance(instruction, Update):
                source = ranks[_in_turn(pipeline, worker, instruction.version)] if in_turn else None
                yield ReduceGradients(instruction.version, chunk, source)
            yield instruction


def _in_turn(pipeline: Pipeline, worker: Worker, version: int) -> Worker:
    """The replica whose turn a version is."""
    return Worker(stage=worker.stage, replica=(version - 1) % pipeline.replicas[worker.stage])


def _ranks(pipeline: Pipeline, stage: int, ranks: Mapping[Worker, int]) -> Sequence[int]:
    """The workers of a neighbouring stage by replica, which take its microbatches in turn; none beyond the ends."""
    if not 0 <= stage < pipeline.depth:
        return ()
    return [ranks[Worker(stage=stage % pipeline.span, replica=replica)] for replica in range(pipeline.replicas[stage])]
