"""Run ends: the predicted start and end of a run that is too long to be played, and what all of it comes to."""

from dataclasses import replace
from itertools import chain

from planner_service.core.errors import InvalidInputError
from planner_service.core.plan import Plan
from planner_service.core.predict import long_program_of, predict
from planner_service.core.schedule.among_stages import AmongStages
from planner_service.core.schedule.repeating import Repeating
from planner_service.core.schedule.text import format_instruction
from planner_service.core.summary import Summary, lengthened, summarise
from planner_service.core.timeline import Lane, Timeline


def predict_ends(
    plan: Plan,
    *,
    batches: int,
    window: int,
    first_batch: int = 0,
    among_stages: AmongStages = AmongStages(),  # noqa: B008 (frozen)
) -> tuple[Timeline, Summary]:
    """The first and the last `window` batches, as they would be in the timeline of all of them, and its summary.

    Played are twice `window` batches. The second half is then the run's end, later by the batches in the middle, each
    of which takes as long as the median one. Raises InvalidInputError for a window that does not fill the pipeline.
    """
    program = long_program_of(plan, batches=batches, first_batch=first_batch, among_stages=among_stages)
    played = predict(plan, batches=2 * window, first_batch=first_batch, among_stages=among_stages)
    summary = lengthened(summarise(played), batches)
    later_s = (batches - 2 * window) * summary.batch_s
    lanes = []
    for lane, stream in zip(played.lanes, program.streams, strict=True):
        instructions = stream.instructions
        if not isinstance(instructions, Repeating) or not instructions.settled < window < batches / 2:
            raise InvalidInputError("window", "must be more batches than fill the pipeline, less than half", window)
        last = instructions[instructions.start(batches - window) :]
        lanes.append(_ends(lane, instructions.start(window), tuple(map(format_instruction, last)), later_s))
    return replace(played, lanes=tuple(lanes)), summary


def _ends(lane: Lane, first: int, last: tuple[str, ...], later_s: float) -> Lane:
    """The lane with the texts of its last instructions, and their times that much later."""
    start_s, end_s = (
        tuple(chain(times[:first], (moment_s + later_s for moment_s in times[first:])))
        for times in (lane.start_s, lane.end_s)
    )
    return replace(lane, instructions=lane.instructions[:first] + last, start_s=start_s, end_s=end_s)
