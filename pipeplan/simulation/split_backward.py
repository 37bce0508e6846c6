"""Split backward: 2BP's pass, with the idle gaps from a simulation. Program + costs -> the program with p1 and p2."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from math import isclose

from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.instructions import Checkpoint, Instruction, RecvActivation, RecvGradient, Update
from pipeplan.programs.program import Program
from pipeplan.programs.repeating import Repeating
from pipeplan.programs.two_bp import with_half_way_weight_gradients, with_weight_gradients, without_weight_gradients
from pipeplan.simulation.play import simulate

_BATCHES_PLAYED = (2, 4, 8)
"""Tried one after another until batches are equal: two suffice unless a stage ends long after the others."""

_ROUNDING = 1e-9
"""Times that differ by no more than this share of a run's end are equal but for rounding."""


def split_backward(
    program: Program, costs: Sequence[StageCosts], devices: Sequence[Sequence[int]] = (), *, half_way: bool = False
) -> Program:
    """2BP (2024, section 3): 1F1B does p2 in its idle gaps and the rest at the end of a batch; the other schedules with
    a flush do all of it there. `half_way` is the memory-saving variant (figure 5): half-way through a batch it does the
    remaining p2 of the first half.

    The gaps are those of the stream with all of p2 at the end (or in the blocks), played with `costs`, one entry for
    each stage, on `devices` as `simulate` takes them. The shortest length of a gap over all batches counts: filling it
    delays nothing. A batch's instructions are the same wherever a run starts, ends or writes a checkpoint. Raises
    InvalidInputError for a schedule without a flush.
    """
    inputs_only = without_weight_gradients(program)
    if half_way:
        inputs_only = with_half_way_weight_gradients(inputs_only)
    weight_s = [costs[stream.stage].backward_weight_s for stream in program.streams]
    never_idle = [[0.0] * len(stream.instructions) for stream in inputs_only.streams]
    at_the_end = with_weight_gradients(inputs_only, never_idle, weight_s)
    if not program.schedule.fills_gaps:
        return at_the_end

    idle_s = []
    for stream, batch_s in zip(at_the_end.streams, _shortest_waits_s(at_the_end, costs, devices), strict=True):
        every_batch_s = cycle(batch_s)  # the same in all batches; no worker waits at a checkpoint
        idle_s.append([0.0 if isinstance(one, Checkpoint) else next(every_batch_s) for one in stream.instructions])
    return with_weight_gradients(at_the_end, idle_s, weight_s)


def _shortest_waits_s(
    program: Program, costs: Sequence[StageCosts], devices: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Every worker's shortest wait at each instruction of a batch, over all batches.

    Stages end a batch at different times, so the next batch has other gaps. Once all stages end a batch later than the
    previous one by the same time, all further batches are equal.
    """
    for batches in _BATCHES_PLAYED:
        # The streams up to their first update, repeated: after a flush a batch's instructions are the last one's.
        pipeline = replace(program.pipeline, batches=batches)
        streams = []
        for stream in program.streams:
            end = next(i for i, one in enumerate(stream.instructions) if isinstance(one, Update)) + 1
            block = tuple(stream.instructions[:end])
            instructions = tuple(Repeating([block], pipeline=pipeline, settled=0, updates=1))
            streams.append(replace(stream, instructions=instructions))
        lanes = simulate(replace(program, pipeline=pipeline, streams=tuple(streams)), costs, devices).lanes

        ends_s = [lane.end_s[len(lane.end_s) // batches - 1 :: len(lane.end_s) // batches] for lane in lanes]
        later_s = [lane_s[-1] - lane_s[-2] for lane_s in ends_s]
        if all(isclose(each_s, later_s[0], abs_tol=_ROUNDING * ends_s[0][-1]) for each_s in later_s):
            break

    shortest_s = []
    for lane in lanes:
        # A worker waits at a receive for as long as the receive takes beyond its own overhead.
        own, count = costs[lane.stage], len(lane.instructions) // batches
        own_s: dict[type[Instruction], float] = {
            RecvActivation: own.handing_over_s(onward=False),
            RecvGradient: own.handing_over_s(onward=True),
        }
        waits_s = [
            max(end_s - start_s - own_s[type(one)], 0.0) if type(one) in own_s else 0.0
            for one, start_s, end_s in zip(lane.instructions, lane.start_s, lane.end_s, strict=True)
        ]
        shortest_s.append([min(waits_s[index::count]) for index in range(count)])
    return shortest_s
