"""The communication pass: adds what moves between the stages, and between a stage's replicas."""

from collections.abc import Iterable, Iterator, Mapping

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


def communicate(
    instructions: Iterable[Instruction], pipeline: Pipeline, worker: Worker, ranks: Mapping[Worker, int]
) -> Iterator[Instruction]:
    """Receives stand right before the compute that needs them, sends right after the compute that makes them.

    The peer of a microbatch is the replica of the neighbouring stage that computes it, in both directions.
    """
    first, last = worker.stage == 0, worker.stage == pipeline.depth - 1

    def peer(microbatch: int, stage: int) -> int:
        return ranks[Worker(stage=stage, replica=pipeline.replica_of(microbatch, stage))]

    for instruction in instructions:
        before: Instruction | None = None
        after: Instruction | None = None
        match instruction:
            case Forward(microbatch=k):
                before = None if first else RecvActivation(k, peer(k, worker.stage - 1))
                after = None if last else SendActivation(k, peer(k, worker.stage + 1))
            case Backward(microbatch=k) | BackwardInput(microbatch=k):
                before = None if last else RecvGradient(k, peer(k, worker.stage + 1))
                after = None if first else SendGradient(k, peer(k, worker.stage - 1))
            case Update(version=version):
                before = ReduceGradients(version) if pipeline.replicas[worker.stage] > 1 else None
            case _:
                pass
        yield from (i for i in (before, instruction, after) if i is not None)
