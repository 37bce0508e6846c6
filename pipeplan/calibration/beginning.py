"""Beginning: predicts the rest of a run from its first second.

The stages' compute takes as long as in that second, less the time that other programs took. Everything else keeps the
plan's costs. The plan is then played again.
"""

from dataclasses import replace

from pipeplan.programs.instructions import Update
from pipeplan.programs.timeline import Timeline

FIRST_S = 1.0

LEAST_BATCHES = 3
"""Lower bound on the batches. The first one warms up."""


def beginning(timeline: Timeline, *, seconds: float = FIRST_S) -> Timeline | None:
    """The first batches that together take this long, or all if they take less. None if there are too few.

    A batch ends with its last update on every worker.
    """
    if timeline.batches < LEAST_BATCHES:
        return None
    ends = []  # the index of each batch's last update
    for lane in timeline.lanes:
        updates = [index for index, one in enumerate(lane.instructions) if isinstance(one, Update)]
        a_batch = len(updates) // timeline.batches
        ends.append(updates[a_batch - 1 :: a_batch])
    start_s = min(lane.start_s[0] for lane in timeline.lanes)
    for batches in range(LEAST_BATCHES, timeline.batches + 1):
        end_s = max(lane.end_s[its[batches - 1]] for lane, its in zip(timeline.lanes, ends, strict=True))
        if end_s - start_s >= seconds:
            break
    columns = ("instructions", "start_s", "end_s", "memory_bytes")
    lanes = (
        replace(lane, **{name: getattr(lane, name)[: its[batches - 1] + 1] for name in columns})
        for lane, its in zip(timeline.lanes, ends, strict=True)
    )
    return replace(timeline, lanes=tuple(lanes), batches=batches)
