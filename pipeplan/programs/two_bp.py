"""2BP (2024): the backward split in two.

p1 is the gradient of a stage's input; the stage upstream waits for it. p2 is the gradient of the stage's weights; only
the update needs it.

stage 0   F1 F2       I1    I2 W1,2 U1
stage 1      F1 I1 W1 F2 I2 W2      U1      (the gap before F2 is long enough for W1)

The memory-saving variant (figure 5) computes the p2 of a batch's first half half-way through the batch, in one block:

stage 0   F1 F2       I1 W1 F3 I2 ...
stage 1      F1 I1 W1 F2 I2 ...

This is a pass over the streams of a schedule with a flush. Only a simulation knows where the idle time is: the pass
gets it as seconds for each instruction (`simulation.split_backward` asks the simulator).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeplan.errors import require
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Instruction,
    ReduceGradients,
    SendGradient,
    Update,
)
from pipeplan.programs.program import Program

_ROUNDING = 1e-9
"""A gap that is shorter than it should be by this share was made so by adding up seconds."""


def without_weight_gradients(program: Program) -> Program:
    """The program with p1 alone. It does not train: p2 is still to be placed.

    Raises InvalidInputError without a flush, and where a stage recomputes by block.

    PipeDream updates after every minibatch, and 2BW's batches overlap: both need p2 at once or in the steady state,
    in which there is no idle time to fill. ZB-H1 places p2 by itself.
    """
    rule = "must have a flush and a whole backward (as 1f1b and gpipe have) to split it in two (2BP)"
    require(program.schedule.takes_two_bp, "schedule", rule, program.schedule.name)
    by_block = any(map(program.pipeline.recomputes_by_block, range(program.pipeline.depth)))
    require(not by_block, "recompute_unit", "must be stage where the backward is split in two (2BP)", "block")
    streams = [
        [BackwardInput(i.microbatch, i.version) if isinstance(i, Backward) else i for i in stream.instructions]
        for stream in program.streams
    ]
    return _changed(program, streams)


def with_half_way_weight_gradients(program: Program) -> Program:
    """Adds to a program with p1 alone the block of p2 for the first half of every batch (2BP 2024, figure 5).

    The block stands after the last p1 of that half and after the send of its gradient, on every stage. It holds up all
    stages for the same time, and adds no idle time on equal stages. An odd half is rounded down.
    """
    half = program.pipeline.microbatches // 2
    streams = []
    for stream in program.streams:
        over = SendGradient if stream.stage > 0 else BackwardInput
        done: list[BackwardInput] = []
        instructions: list[Instruction] = []
        for instruction in stream.instructions:
            instructions.append(instruction)
            if isinstance(instruction, BackwardInput):
                done.append(instruction)
            elif isinstance(instruction, Update):
                done = []
            if isinstance(instruction, over) and len(done) == half:
                instructions += _concatenated(done)
        streams.append(instructions)
    return _changed(program, streams)


def with_weight_gradients(program: Program, idle_s: Sequence[Sequence[float]], weight_s: Sequence[float]) -> Program:
    """Adds p2 to a program of p1. A program that has p2 half-way or at the end of a batch gets some of it earlier.

    `idle_s` says for every instruction of every rank how long the worker waits at it, `weight_s` how long a p2 takes on
    every rank. The pass puts p2 of microbatches whose p1 is done before an instruction that waits long enough, as many
    as fit whole. It puts what is left of a batch, concatenated, before the batch's update, and what is left of a half
    into the half's block.
    """
    streams = []
    for stream, gaps_s, p2_s in zip(program.streams, idle_s, weight_s, strict=True):
        pending: list[BackwardInput] = []
        instructions: list[Instruction] = []
        for instruction, gap_s in zip(stream.instructions, gaps_s, strict=True):
            if isinstance(instruction, BackwardWeight | ReduceGradients | Update):
                fitting = len(pending)
            else:  # a p2 that takes no time waits for the end of its batch
                fitting = int(gap_s / p2_s * (1 + _ROUNDING)) if p2_s > 0 else 0
            instructions += _concatenated(pending[:fitting])
            pending = pending[fitting:]
            if isinstance(instruction, BackwardInput):
                pending.append(instruction)
            if not isinstance(instruction, BackwardWeight):
                instructions.append(instruction)
        streams.append(instructions)
    return _changed(program, streams)


def _changed(program: Program, streams: Sequence[Iterable[Instruction]]) -> Program:
    """The program with these instructions in its streams, by rank."""
    changed = zip(program.streams, streams, strict=True)
    return replace(program, streams=tuple(replace(stream, instructions=tuple(new)) for stream, new in changed))


def _concatenated(done: Sequence[BackwardInput]) -> list[BackwardWeight]:
    """One p2 of all these microbatches, if there are any."""
    return [BackwardWeight(tuple(p1.microbatch for p1 in done), done[0].version)] if done else []
