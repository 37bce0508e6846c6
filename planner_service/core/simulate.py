"""Simulate: plays a program's streams with given costs. Streams + stage costs -> Timeline.

Every worker executes its stream in order. A send hands its tensor to the link and goes on; a receive waits for the
arrival. A gradient exchange waits for all replicas, one among stages for all of them. This is what the runtime does, so
the two timelines hold the same instructions.

What crosses a level of the network leaves the unit of devices inside it through one port and enters another's through
its own: that is where a level's bandwidth is. A port carries one thing after another, each direction by itself, first
in, first out; gradient exchanges pass it as well, a ring once a unit. What replicas of a stage hand over at the same
instant shares the port and arrives together. Costs that name no port have a link of their own for every sender,
receiver and direction: the papers' pictures.
"""

from collections.abc import Sequence

from planner_service.core.engine import Engine
from planner_service.core.schedule.footprint import held_counts
from planner_service.core.schedule.program import Program, Stream
from planner_service.core.schedule.text import format_instruction
from planner_service.core.stage_costs import StageCosts
from planner_service.core.timeline import Lane, Timeline


def simulate(program: Program, costs: Sequence[StageCosts], devices: Sequence[int] = ()) -> Timeline:
    """The timeline of the program with these costs, one entry a stage.

    `devices` says which device of the cluster a rank is on, where it is not that of its own number. Takes n log n for n
    instructions, n where no port is shared. Raises ScheduleError if the streams cannot all be played to their end.
    """
    engine = Engine(program, costs, devices or range(len(program.streams)))
    engine.play()
    return Timeline(
        lanes=tuple(
            _lane(stream, costs[stream.stage], program.pipeline.recomputes(stream.stage), *times)
            for stream, *times in zip(program.streams, engine.start_s, engine.end_s, strict=True)
        ),
        batch_size=program.pipeline.batch_microbatches * costs[0].microbatch_size,
        batches=program.pipeline.batches,
    )


def _lane(stream: Stream, costs: StageCosts, recompute: bool, start_s: list[float], end_s: list[float]) -> Lane:
    held_bytes = _HeldBytes(costs)
    return Lane(
        rank=stream.rank,
        stage=stream.stage,
        replica=stream.replica,
        instructions=tuple(map(format_instruction, stream.instructions)),
        start_s=tuple(start_s),
        end_s=tuple(end_s),
        memory_bytes=tuple(held_bytes[held] for held in held_counts(stream.instructions, recompute=recompute)),
    )


class _HeldBytes(dict[tuple[int, int, int, int], int]):
    """The bytes of (activations, inputs, versions, weight gradients), each computed once: there are few."""

    def __init__(self, costs: StageCosts) -> None:
        super().__init__()
        self._costs = costs

    def __missing__(self, held: tuple[int, int, int, int]) -> int:
        activations, inputs, versions, weight_gradients = held
        self[held] = self._costs.held_bytes(
            activations=activations, inputs=inputs, versions=versions, weight_gradients=weight_gradients
        )
        return self[held]
