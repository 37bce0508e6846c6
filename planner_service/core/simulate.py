"""Simulate: plays a program's streams with given costs. Streams + stage costs -> Timeline.

Every worker executes its stream in order. A send hands its tensor to the link and goes on; a receive waits for the
arrival. A gradient exchange waits for all replicas, one among stages for all of them; one that was begun ahead goes on
beside whatever its workers do, on a link of its own. This is what the runtime does, so the two timelines hold the same
instructions.

What crosses a level of the network leaves the unit of devices inside it through one port and enters another's through
its own: that is where a level's bandwidth is. A port carries one thing after another, each direction by itself, first
in, first out; gradient exchanges pass it as well, a ring once a unit. What replicas of a stage hand over at the same
instant shares the port and arrives together. Costs that name no port have a link of their own for every sender,
receiver and direction: the papers' pictures.
"""

from collections.abc import Sequence

from planner_service.core.engine import Engine
from planner_service.core.schedule.footprint import first_versions, held_counts
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
            _lane(stream, _held_bytes(program, stream, costs), *times)
            for stream, *times in zip(program.streams, engine.start_s, engine.end_s, strict=True)
        ),
        batch_size=program.pipeline.batch_microbatches * costs[0].microbatch_size,
        batches=program.pipeline.batches,
    )


def _held_bytes(program: Program, stream: Stream, costs: Sequence[StageCosts]) -> tuple[int, ...]:
    """What the rank holds after each of its instructions, all its stages together."""
    by_chunk = [
        _stage_bytes(part, costs[part.stage], program.pipeline.recomputes(part.stage))
        for part in program.stage_streams(stream)
    ]
    if len(by_chunk) == 1:
        return by_chunk[0]
    following = [iter(held_bytes) for held_bytes in by_chunk]
    now_bytes = [
        costs[part.stage].held_bytes(versions=len(first_versions(part.instructions)), activations=0, inputs=0)
        for part in program.stage_streams(stream)
    ]
    held_bytes = []
    for instruction in stream.instructions:
        now_bytes[instruction.chunk] = next(following[instruction.chunk])
        held_bytes.append(sum(now_bytes))
    return tuple(held_bytes)


def _stage_bytes(stream: Stream, costs: StageCosts, recompute: bool) -> tuple[int, ...]:
    held_bytes = _HeldBytes(costs)
    return tuple(held_bytes[held] for held in held_counts(stream.instructions, recompute=recompute))


def _lane(stream: Stream, memory_bytes: tuple[int, ...], start_s: list[float], end_s: list[float]) -> Lane:
    return Lane(
        rank=stream.rank,
        stage=stream.stage,
        replica=stream.replica,
        instructions=tuple(map(format_instruction, stream.instructions)),
        start_s=tuple(start_s),
        end_s=tuple(end_s),
        memory_bytes=memory_bytes,
    )


class _HeldBytes(dict[tuple[int, ...], int]):
    """The bytes of what `held_counts` gives, each computed once: there are few."""

    def __init__(self, costs: StageCosts) -> None:
        super().__init__()
        self._costs = costs

    def __missing__(self, held: tuple[int, ...]) -> int:
        activations, inputs, versions, weight_gradients, gradients = held
        self[held] = self._costs.held_bytes(
            activations=activations,
            inputs=inputs,
            versions=versions,
            weight_gradients=weight_gradients,
            gradients=gradients,
        )
        return self[held]
