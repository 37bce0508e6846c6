"""Throughput: samples a second, read off a timeline."""

from itertools import pairwise
from statistics import median

from planner_service.core.schedule.text import UPDATE_LETTER
from planner_service.core.timeline import Timeline


def throughput_samples_per_s(timeline: Timeline) -> float:
    """Samples a second in steady state: a batch over `batch_s`."""
    return timeline.batch_size / batch_s(timeline)


def batch_s(timeline: Timeline) -> float:
    """The median time between two batches' ends.

    A batch ends with its last update on the input stage, the last to update, so that a flush's whole bubble counts.
    The first batch fills the pipeline and is left out where there is more than one. The median, as in profiles, leaves
    out what other programs took from a few batches.
    """
    ends_s = _batch_ends_s(timeline)
    if len(ends_s) == 1:
        start_s = min(lane.start_s[0] for lane in timeline.lanes)
        return ends_s[0] - start_s
    return median(later - earlier for earlier, later in pairwise(ends_s))


def _batch_ends_s(timeline: Timeline) -> list[float]:
    """When each batch was through on the input stage's first replica."""
    lane = next(lane for lane in timeline.lanes if lane.stage == 0 and lane.replica == 0)
    columns = zip(lane.instructions, lane.end_s, strict=True)
    ends_s = [end_s for text, end_s in columns if text[0] == UPDATE_LETTER]
    updates_a_batch = len(ends_s) // timeline.batches
    return ends_s[updates_a_batch - 1 :: updates_a_batch]
