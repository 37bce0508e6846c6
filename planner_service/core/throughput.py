"""Throughput: samples a second, read off a timeline."""

from planner_service.core.schedule.instructions import Update
from planner_service.core.timeline import Timeline


def throughput_samples_per_s(timeline: Timeline) -> float:
    """Samples a second in steady state: from one batch's last update on the input stage to a later batch's.

    The first batch fills the pipeline and is left out where there is more than one. The input stage is the last to
    update, so that this counts a flush's whole bubble.
    """
    done_s = _batch_ends_s(timeline)
    if len(done_s) == 1:
        start_s = min(lane.start_s[0] for lane in timeline.lanes)
        return timeline.batch_size / (done_s[0] - start_s)
    return timeline.batch_size * (len(done_s) - 1) / (done_s[-1] - done_s[0])


def _batch_ends_s(timeline: Timeline) -> list[float]:
    """When each batch was through on the input stage's first replica."""
    lane = next(lane for lane in timeline.lanes if lane.stage == 0 and lane.replica == 0)
    ends_s = [event.end_s for event in lane.events() if isinstance(event.instruction, Update)]
    updates_a_batch = len(ends_s) // timeline.batches
    return ends_s[updates_a_batch - 1 :: updates_a_batch]
