"""Draw: a timeline as text, a row a worker, time from left to right.

stage 0  F1 F2 F3 F4          B1    B2    B3    B4
stage 1     F1 F2 F3 F4    B1    B2    B3    B4
"""

from collections.abc import Sequence

from planner_service.core.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Recompute,
    Update,
)
from planner_service.core.timeline import Event, Lane, Timeline


def draw(timeline: Timeline, *, columns: int, until_s: float | None = None) -> str:
    """The picture of [0, until_s) in so many columns; without `until_s` every event is as wide as its name.

    What lies beyond the last column is left out, and "..." says so. Compute and updates that take time are shown, by
    their text form without the weight version.
    """
    rows = [(lane, [event for event in lane.events() if _is_shown(event)]) for lane in timeline.lanes]
    scale = columns / until_s if until_s else _natural_scale([event for _, events in rows for event in events])
    replicated = any(lane.replica > 0 for lane in timeline.lanes)
    heads = [_head(lane, replicated) for lane in timeline.lanes]
    width = max(map(len, heads))
    return "\n".join(
        f"{head:<{width}}  {_row(events, scale, columns)}".rstrip()
        for head, (_, events) in zip(heads, rows, strict=True)
    )


def _is_shown(event: Event) -> bool:
    return event.end_s > event.start_s and _name(event.instruction) != ""


def _natural_scale(events: Sequence[Event]) -> float:
    """Columns a second at which every name fits into its event, with a blank behind it."""
    return max(((1 + len(_name(e.instruction))) / (e.end_s - e.start_s) for e in events), default=1.0)


def _head(lane: Lane, replicated: bool) -> str:
    return f"stage {lane.stage}.{lane.replica}" if replicated else f"stage {lane.stage}"


def _row(events: Sequence[Event], scale: float, columns: int) -> str:
    row = ""
    for event in events:
        start, stop = round(event.start_s * scale), round(event.end_s * scale)
        if stop > columns:
            return f"{row:<{min(start, columns)}}..."
        row = f"{row:<{start}}{_cell(_name(event.instruction), stop - start)}"
    return row


def _cell(name: str, width: int) -> str:
    """The name, drawn out to the event's end; the last column stays blank where there is room."""
    return f"{name[: max(width - 1, 1)]:-<{width - 1}} " if width > 1 else name[:width]


def _name(instruction: Instruction) -> str:
    match instruction:
        case Forward(microbatch=k):
            return f"F{k}"
        case Recompute(microbatch=k):
            return f"R{k}"
        case Backward(microbatch=k):
            return f"B{k}"
        case BackwardInput(microbatch=k):
            return f"I{k}"
        case BackwardWeight(microbatches=numbers):
            return "W" + ",".join(map(str, numbers))
        case Update(version=version):
            return f"U{version}"
        case _:
            return ""
