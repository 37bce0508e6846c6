"""Split backward: 2BP's pass with the simulator's eyes. Program + costs -> the program with p1 and p2."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from math import isclose

from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.instructions import Checkpoint, Update
from pipeplan.programs.program import Program, Stream
from pipeplan.programs.repeating import Repeating
from pipeplan.programs.timeline import Lane
from pipeplan.programs.two_bp import with_half_way_weight_gradients, with_weight_gradients, without_weight_gradients
from pipeplan.simulation.play import simulate


def split_backward(
    program: Program, costs: Sequence[StageCosts], devices: Sequence[int] = (), *, half_way: bool = False
) -> Program:
    """2BP (2024, section 3): 1F1B does p2 in its idle gaps and the rest at the end of a batch; the other schedules
    with a flush do all of it there. `half_way` is the memory-saving variant (figure 5): what is left of the first half
    of a batch is done half-way through it.

    The gaps are those of the stream with all of p2 at the end (or in the blocks), played with `costs`, an entry a
    stage, on `devices` as `simulate` takes them. A gap counts for as long as it is in the batch in which it is
    shortest, so that filling gaps delays nothing, and a batch's instructions are the same wherever a run starts, ends
    or writes a checkpoint. Raises InvalidInputError for a schedule without a flush.
    """
    inputs_only = without_weight_gradients(program)
    if half_way:
        inputs_only = with_half_way_weight_gradients(inputs_only)
    weight_s = [costs[stream.stage].backward_weight_s for stream in program.streams]
    never_idle = [[0.0] * len(stream.instructions) for stream in inputs_only.streams]
    at_the_end = with_weight_gradients(inputs_only, never_idle, weight_s)
    if not program.schedule.fills_gaps:
        return at_the_end
    idle_s = _shortest_waits_s(at_the_end, costs, devices)
    every_batch = [_every_batch(stream, batch_s) for stream, batch_s in zip(at_the_end.streams, idle_s, strict=True)]
    return with_weight_gradients(at_the_end, every_batch, weight_s)


def _shortest_waits_s(program: Program, costs: Sequence[StageCosts], devices: Sequence[int]) -> list[list[float]]:
    """How long every worker waits at each instruction of a batch, in the batch in which it waits the shortest.

    Stages end a batch at different times, so that the next one's gaps are others. Once all of them end it as much
    later as they ended the one before, every batch is like the last.
    """
    for batches in _BATCHES_PLAYED:
        lanes = simulate(_first_batch_repeated(program, batches), costs, devices).lanes
        if _settled(lanes, batches):
            break
    return [_shortest(_waits_s(lane, costs[lane.stage]), batches) for lane in lanes]


def _first_batch_repeated(program: Program, batches: int) -> Program:
    """The streams up to their first update, so many times: after a flush a batch's instructions are the last one's."""
    pipeline = replace(program.pipeline, batches=batches)

    def repeated(stream: Stream) -> Stream:
        end = next(i for i, one in enumerate(stream.instructions) if isinstance(one, Update)) + 1
        block = tuple(stream.instructions[:end])
        instructions = Repeating([block], pipeline=pipeline, settled=0, updates=1)
        return replace(stream, instructions=tuple(instructions))

    return replace(program, pipeline=pipeline, streams=tuple(repeated(stream) for stream in program.streams))


def _shortest(waits_s: Sequence[float], batches: int) -> list[float]:
    """The shortest of each instruction's waits in batches of equally many instructions."""
    count = len(waits_s) // batches
    return [min(waits_s[index::count]) for index in range(count)]


def _settled(lanes: Sequence[Lane], batches: int) -> bool:
    """Whether the last batch ended on all workers as much later as the one before."""
    ends_s = [lane.end_s[len(lane.end_s) // batches - 1 :: len(lane.end_s) // batches] for lane in lanes]
    later_s = [lane_s[-1] - lane_s[-2] for lane_s in ends_s]
    return all(isclose(each_s, later_s[0], abs_tol=_ROUNDING * ends_s[0][-1]) for each_s in later_s)


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


_BATCHES_PLAYED = (2, 4, 8)
"""Tried one after another until batches are alike: two will do unless a stage ends long after the others."""

_ROUNDING = 1e-9
"""Of a run's end: so far apart are times that adding up made unequal."""
