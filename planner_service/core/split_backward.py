"""Split backward: 2BP's pass with the simulator's eyes. Program + costs -> the program with p1 and p2."""

from collections.abc import Sequence

from planner_service.core.schedule.program import Program
from planner_service.core.schedule.two_bp import with_weight_gradients, without_weight_gradients
from planner_service.core.simulate import simulate
from planner_service.core.stage_costs import StageCosts
from planner_service.core.timeline import Lane


def split_backward(program: Program, costs: Sequence[StageCosts], devices: Sequence[int] = ()) -> Program:
    """2BP (2024, section 3): 1F1B does p2 in its idle gaps and the rest at the end of a batch; the other schedules
    with a flush do all of it there.

    The gaps are those of the stream without p2, played with `costs`, an entry a stage, on `devices` as `simulate` takes
    them: filling gaps delays nothing.
    Raises InvalidInputError for a schedule without a flush.
    """
    inputs_only = without_weight_gradients(program)
    idle_s = [[0.0] * len(stream.instructions) for stream in inputs_only.streams]
    if program.schedule == "1f1b":
        idle_s = [_waits_s(lane, costs[lane.stage]) for lane in simulate(inputs_only, costs, devices).lanes]
    return with_weight_gradients(
        inputs_only, idle_s, [costs[stream.stage].backward_weight_s for stream in program.streams]
    )


def _waits_s(lane: Lane, costs: StageCosts) -> list[float]:
    """How long the worker waits at each instruction: a receive's time beyond what an instruction takes."""
    columns = zip(lane.instructions, lane.start_s, lane.end_s, strict=True)
    return [
        max(end_s - start_s - costs.instruction_s, 0.0) if text.startswith("<") else 0.0
        for text, start_s, end_s in columns
    ]
