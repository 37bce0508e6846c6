"""Split backward: 2BP's pass with the simulator's eyes. Program + costs -> the program with p1 and p2."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from planner_service.core.schedule.instructions import Checkpoint, Update
from planner_service.core.schedule.program import Program, Stream
from planner_service.core.schedule.two_bp import (
    with_half_way_weight_gradients,
    with_weight_gradients,
    without_weight_gradients,
)
from planner_service.core.simulate import simulate
from planner_service.core.stage_costs import StageCosts
from planner_service.core.timeline import Lane


def split_backward(
    program: Program, costs: Sequence[StageCosts], devices: Sequence[int] = (), *, half_way: bool = False
) -> Program:
    """2BP (2024, section 3): 1F1B does p2 in its idle gaps and the rest at the end of a batch; the other schedules
    with a flush do all of it there. `half_way` is the memory-saving variant (figure 5): what is left of the first half
    of a batch is done half-way through it.

    The gaps are those of the stream without p2, played with `costs`, an entry a stage, on `devices` as `simulate` takes
    them: filling gaps delays nothing. One batch is played: after a flush the next one is like it, so that a batch's
    instructions are the same wherever a run starts, ends or writes a checkpoint.
    Raises InvalidInputError for a schedule without a flush.
    """
    inputs_only = without_weight_gradients(program)
    if half_way:
        inputs_only = with_half_way_weight_gradients(inputs_only)
    idle_s = [[0.0] for _ in program.streams]
    if program.schedule == "1f1b":
        idle_s = [
            _waits_s(lane, costs[lane.stage]) for lane in simulate(_first_batch(inputs_only), costs, devices).lanes
        ]
    return with_weight_gradients(
        inputs_only,
        [_every_batch(stream, batch_s) for stream, batch_s in zip(inputs_only.streams, idle_s, strict=True)],
        [costs[stream.stage].backward_weight_s for stream in program.streams],
    )


def _first_batch(program: Program) -> Program:
    """The streams up to their first update."""
    ends = [next(i for i, one in enumerate(s.instructions) if isinstance(one, Update)) + 1 for s in program.streams]
    streams = (
        replace(stream, instructions=stream.instructions[:end])
        for stream, end in zip(program.streams, ends, strict=True)
    )
    return replace(program, streams=tuple(streams), pipeline=replace(program.pipeline, batches=1))


def _every_batch(stream: Stream, batch_s: Sequence[float]) -> list[float]:
    """One batch's seconds again and again; nobody waits at a checkpoint."""
    seconds = cycle(batch_s)
    return [0.0 if isinstance(instruction, Checkpoint) else next(seconds) for instruction in stream.instructions]


def _waits_s(lane: Lane, costs: StageCosts) -> list[float]:
    """How long the worker waits at each instruction: a receive's time beyond what an instruction takes."""
    columns = zip(lane.instructions, lane.start_s, lane.end_s, strict=True)
    return [
        max(end_s - start_s - costs.instruction_s, 0.0) if text.startswith("<") else 0.0
        for text, start_s, end_s in columns
    ]
