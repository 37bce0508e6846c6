"""Total: the totals of a program's play. Streams + stage costs -> Total, for prices.

The engine is the same as for timelines (`play`), and so are the numbers. But the instructions themselves are not
needed: streams may leave out their transfers, which their compute implies. That takes a third of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.instructions import COMPUTE, NUMBERS, BackwardWeight, Update, marking, numbered
from pipeplan.programs.program import Program
from pipeplan.simulation.play import Engine, peak_bytes

_COMPUTES, _UPDATES = marking(COMPUTE), marking({Update})
_VERSION = attrgetter("version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """The totals of a play. `batch_ends_s` are those on the input stage's first replica (`programs.timeline`); of every
    rank, the seconds of its compute, and the peak of its bytes. `events_s` [batch, event] are the ends of every rank's
    updates and of every exchange.
    """

    batch_ends_s: tuple[float, ...]
    span_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    events_s: FloatArray = field(compare=False)


def total(
    program: Program, costs: Sequence[StageCosts], devices: Sequence[Sequence[int]] = (), *, implied: bool = False
) -> Total:
    """The totals of the timeline that `simulate` gives for the program with these costs.

    Raises ScheduleError if the streams cannot all be played to their end.
    """
    engine = Engine(program, costs, devices, implied=implied)
    engine.play()
    batch_ends_s: list[float] = []
    busy_s: list[float] = []
    peaks_bytes: list[int] = []
    batches, events_s = program.pipeline.batches, list[FloatArray]()
    known: dict[object, int] = {}
    for stream, column, start_s, end_s in zip(
        program.streams, engine.columns, engine.start_s, engine.end_s, strict=True
    ):
        instructions = stream.instructions
        kinds = column.kinds or numbered(instructions)
        ends_s, is_compute = np.asarray(end_s), np.frombuffer(kinds.translate(_COMPUTES), dtype=np.bool_)
        busy_s.append(sum((ends_s - np.asarray(start_s))[is_compute].tolist(), 0.0))
        held: object = stream.rank
        if implied and program.pipeline.replicas[stream.stage] > 1 and NUMBERS[BackwardWeight] not in kinds:
            # Replicas of a stage mostly differ only in the numbers of their microbatches, and hold equal bytes.
            held = stream.stage, kinds, tuple(map(_VERSION, instructions))
        if held not in known:
            known[held] = peak_bytes(program, stream, costs, kinds)
        peaks_bytes.append(known[held])
        updates_s = list(compress(end_s, kinds.translate(_UPDATES)))
        events_s.append(_by_batch(updates_s, batches))
        if stream.stage == 0 and stream.replica == 0:
            a_batch = len(updates_s) // batches
            batch_ends_s = updates_s[a_batch - 1 :: a_batch]
    events_s += (_by_batch(sorted(ends_s), batches) for ends_s in engine.exchange_ends_s())
    return Total(
        batch_ends_s=tuple(batch_ends_s),
        span_s=max(engine.over_s, default=0.0),
        busy_s=tuple(busy_s),
        peak_bytes=tuple(peaks_bytes),
        events_s=np.hstack(events_s),
    )


def _by_batch(ends_s: Sequence[float], batches: int) -> FloatArray:
    """[batch, event]: events with an equal number in every batch, in order."""
    a_batch = len(ends_s) // batches
    return np.asarray(ends_s[: a_batch * batches], dtype=np.float64).reshape(batches, a_batch)
