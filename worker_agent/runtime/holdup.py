"""Holdup: what a rank is at, as its status says it: the first instruction that its device has not finished.

On a GPU the host hands instructions over and runs ahead. While the device has some of them to do, they are what the
rank is at, wherever its host waits. On a CPU the device has finished whatever the host has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Forward,
    Instruction,
    Recompute,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    ReduceNorm,
    ReduceTied,
    SendActivation,
    SendGradient,
    StartReduce,
    Update,
)
from worker_agent.runtime.status import ENDING, STARTING, Activity, Status


@dataclass(frozen=True, slots=True)
class Holdup:
    """The unfinished instructions, by their places in the stream (none before the first one), and what is at hand.

    `on_device`: the host has gone on to a later instruction.
    """

    unfinished: range
    activity: Activity
    on_device: bool = False


def holdup(status: Status, instructions: Sequence[Instruction]) -> Holdup:
    """What a rank is at."""
    host = len(instructions) if status.instruction == ENDING else status.instruction
    if status.finished < host:
        unfinished = range(status.finished, min(host + 1, len(instructions)))
        return Holdup(unfinished, activity_of(instructions[status.finished]), on_device=True)
    if status.instruction < 0:
        return Holdup(range(0), Activity.OWN if status.instruction == STARTING else Activity.PEER)
    return Holdup(range(host, host + 1), Activity(status.activity) or activity_of(instructions[host]))


def activity_of(instruction: Instruction) -> Activity:
    """What an instruction is, but for the data that a forward reads."""
    match instruction:
        case Forward() | Backward() | Recompute() | BackwardInput() | BackwardWeight() | Update():
            return Activity.OWN
        case SendActivation() | RecvActivation() | SendGradient() | RecvGradient():
            return Activity.PEER
        case StartReduce() | ReduceGradients() | ReduceTied() | ReduceNorm():
            return Activity.PEER
        case Checkpoint():
            return Activity.CHECKPOINT
        case _:
            assert_never(instruction)
