"""Total: what a program's play comes to. Streams + stage costs -> Total, for prices.

The engine is the same as for timelines (`play`), and so are the figures. But nobody looks at the instructions: streams
may leave out their transfers, which their compute implies. That takes a third of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.instructions import COMPUTE, Update
from pipeplan.programs.program import Program
from pipeplan.simulation.play import Engine, peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A play in sum. `batch_ends_s` are those on the input stage's first replica (`programs.timeline`); of every rank,
    the seconds of its compute, and the most bytes held after any instruction.
    """

    batch_ends_s: tuple[float, ...]
    span_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]


def total(
    program: Program, costs: Sequence[StageCosts], devices: Sequence[Sequence[int]] = (), *, implied: bool = False
) -> Total:
    """What the program's timeline with these costs comes to, as `simulate` gives it.

    Raises ScheduleError if the streams cannot all be played to their end.
    """
    engine = Engine(program, costs, devices, implied=implied)
    engine.play()
    batch_ends_s: list[float] = []
    busy_s: list[float] = []
    for stream, start_s, end_s in zip(program.streams, engine.start_s, engine.end_s, strict=True):
        instructions = stream.instructions
        taken_s = list(map(sub, end_s, start_s))
        for index in [index for index, kind in enumerate(map(type, instructions)) if kind not in COMPUTE]:
            taken_s[index] = 0.0
        busy_s.append(sum(taken_s))
        if stream.stage == 0 and stream.replica == 0:
            updates = [place for place, one in enumerate(instructions) if isinstance(one, Update)]
            a_batch = len(updates) // program.pipeline.batches
            batch_ends_s = [end_s[place] for place in updates[a_batch - 1 :: a_batch]]
    return Total(
        batch_ends_s=tuple(batch_ends_s),
        span_s=max(engine.over_s, default=0.0),
        busy_s=tuple(busy_s),
        peak_bytes=tuple(peak_bytes(program, stream, costs) for stream in program.streams),
    )
