"""Communication: the passes that add transfers between stages, and exchanges among a stage's replicas.

`communicate` adds the sends and receives around the compute, and the exchange among replicas (G) before each update.
`exchange_among_stages` adds the exchanges among stages that an update needs, to any streams:

stage 0   F1 F2       B1    B2 G1 T1:0,1 N1 U1
stage 1      F1 B1 F2 B2       G1 T1:0,1 N1 U1

First the replicas of a stage average their gradients (G). Then stages that share weights sum their gradients (T). Then
all stages agree on the norm of the whole gradient (N). Every worker has its exchanges in this order, and those of one
version before those of the next. The sends before an exchange do not wait: no worker waits for what follows the
exchange on another worker.

With a flush the stages have finished a batch when they meet. They wait in the drain, where they are idle in any case.
Under 2BW the last stage finishes a batch first. It waits for the first stage's last backward before it continues with
the next batch. This costs about one bubble of a flush in each batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeplan.documents.plan import Worker
from pipeplan.errors import require
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    Checkpoint,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    ReduceNorm,
    ReduceTied,
    SendActivation,
    SendGradient,
    Update,
)
from pipeplan.programs.pipeline import Pipeline
from pipeplan.programs.program import Program

_BACKWARD = (Backward, BackwardInput)


def communicate(
    instructions: Iterable[Instruction],
    pipeline: Pipeline,
    worker: Worker,
    ranks: Mapping[Worker, int],
    *,
    in_turn: bool = False,
) -> Iterator[Instruction]:
    """A worker's stream with its sends and receives, and its exchanges among replicas."""
    exchanging = with_exchanges(instructions, pipeline, worker, ranks, in_turn=in_turn)
    return with_transfers(exchanging, pipeline, worker, ranks)


def with_exchanges(
    instructions: Iterable[Instruction],
    pipeline: Pipeline,
    worker: Worker,
    ranks: Mapping[Worker, int],
    *,
    in_turn: bool = False,
) -> Iterable[Instruction]:
    """The stream with its exchanges among replicas.

    A version is made from the gradients of all replicas, or, `in_turn`, from those of one replica after the other.
    """
    replicas = pipeline.replicas[worker.stage]
    if replicas == 1:
        return instructions
    if not in_turn:
        return exchanging(instructions)
    return exchanging(instructions, lambda version: ranks[Worker(stage=worker.stage, replica=(version - 1) % replicas)])


def exchanging(
    instructions: Iterable[Instruction], source: Callable[[int], int | None] = lambda version: None
) -> list[Instruction]:
    """The stream with an exchange before every update, of the gradients of a version's `source` if it has one."""
    listed = instructions if isinstance(instructions, list | tuple) else list(instructions)
    found, done = list[Instruction](), 0
    for place in [index for index, kind in enumerate(map(type, listed)) if kind is Update]:
        update = listed[place]
        assert isinstance(update, Update)
        found += listed[done:place]
        found.append(ReduceGradients(update.version, update.chunk, source(update.version)))
        done = place
    found += listed[done:]
    return found


def with_transfers(
    instructions: Iterable[Instruction], pipeline: Pipeline, worker: Worker, ranks: Mapping[Worker, int]
) -> Iterator[Instruction]:
    """The stream with its sends and receives.

    Receives stand right before the compute that needs them, sends right after the compute that makes them. The peer of
    a microbatch is the replica of the neighbouring stage that computes it, in both directions. Between two stages of
    one rank nothing is sent: the tensors are there.
    """
    stages = [pipeline.stage_of(worker.stage, chunk) for chunk in range(pipeline.chunks)]
    neighbours = [[_ranks(pipeline, worker, stage + step, ranks) for step in (-1, 1)] for stage in stages]
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
            yield instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class AmongStages:
    """The stages that share weights, each group in order, and whether the gradient's norm is requested."""

    tied: tuple[tuple[int, ...], ...] = ()
    norm: bool = False


def exchange_among_stages(program: Program, wanted: AmongStages) -> Program:
    """The program with these exchanges before every update. Raises InvalidInputError for PipeDream, and for ASP.

    Under PipeDream every stage updates after every minibatch, each stage at another one (2018, section 3.3). To meet,
    the stages would have to wait for each other, and only one minibatch would be in flight.
    """
    if not (wanted.tied or wanted.norm):
        return program
    rule = "must update all workers together to clip or scale gradients: under ASP they would wait for each other"
    require(program.schedule.update != "replica", "schedule", rule, program.schedule.name)
    possible = program.schedule.update == "batch" or program.pipeline.depth == 1
    rule = "must update all stages with the same batch to clip or scale gradients or to share weights between stages"
    require(possible, "schedule", rule, program.schedule.name)

    streams = []
    for stream in program.streams:
        stages = {program.pipeline.stage_of(stream.stage, chunk) for chunk in range(program.pipeline.chunks)}
        own = replace(wanted, tied=tuple(group for group in sorted(wanted.tied) if stages.intersection(group)))
        if own.tied or own.norm:
            stream = replace(stream, instructions=tuple(_meeting(stream.instructions, program, own)))
        streams.append(stream)
    return replace(program, streams=tuple(streams))


def _meeting(instructions: Iterable[Instruction], program: Program, wanted: AmongStages) -> Iterator[Instruction]:
    """A rank's stream with its exchanges: after the gradients of all of its stages, before the first of their updates.

    Raises InvalidInputError where the rank does anything else between these updates.
    """
    held: list[Update | Checkpoint] = []
    updates = 0
    for instruction in instructions:
        if isinstance(instruction, Update):
            held.append(instruction)
            updates += 1
        elif held and isinstance(instruction, Checkpoint):
            held.append(instruction)
        else:
            rule = "must update all stages of a rank in a row to clip or scale gradients or to share weights"
            require(not held or isinstance(instruction, ReduceGradients), "schedule", rule, program.schedule.name)
            yield instruction
        if updates == program.pipeline.chunks:
            version = held[-1].version
            yield from (ReduceTied(version, stages) for stages in wanted.tied)
            if wanted.norm:
                yield ReduceNorm(version)
            yield from held
            held, updates = [], 0


def _ranks(pipeline: Pipeline, worker: Worker, stage: int, ranks: Mapping[Worker, int]) -> Sequence[int]:
    """The workers of a neighbouring stage by replica, which take its microbatches in turn.

    None where the worker has that stage itself, and beyond the ends.
    """
    first_stage, _ = pipeline.place_of(stage)
    if not 0 <= stage < pipeline.depth or first_stage == worker.stage:
        return ()
    return [ranks[Worker(stage=first_stage, replica=replica)] for replica in range(pipeline.replicas[stage])]
