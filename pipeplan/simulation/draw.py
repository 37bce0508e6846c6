"""Draw: a timeline as text. Every worker has a row; time passes from left to right.

stage 0  F1 F2 F3 F4          B1    B2    B3    B4
stage 1     F1 F2 F3 F4    B1    B2    B3    B4
"""

from collections.abc import Sequence

from pipeplan.programs.instructions import Update, is_compute
from pipeplan.programs.text import format_instruction
from pipeplan.programs.timeline import Timeline

_Shown = tuple[str, float, float]
"""An instruction's name in the picture, and its start and end."""


def draw(timeline: Timeline, *, columns: int, until_s: float | None = None) -> str:
    """The picture of [0, until_s) in `columns` columns; without `until_s` every event is as wide as its name.

    Events beyond the last column are left out; "..." marks this. Compute and updates that take time are shown, by their
    text form without the weight version.
    """
    rows: list[list[_Shown]] = []
    for lane in timeline.lanes:
        events = zip(lane.instructions, lane.start_s, lane.end_s, strict=True)
        rows.append(
            [
                (format_instruction(instruction).partition("@")[0], start_s, end_s)
                for instruction, start_s, end_s in events
                if end_s > start_s and (is_compute(instruction) or isinstance(instruction, Update))
            ]
        )
    if until_s:
        scale = columns / until_s
    else:  # columns a second at which every name fits into its event, followed by a blank
        fitting = ((1 + len(name)) / (end_s - start_s) for events in rows for name, start_s, end_s in events)
        scale = max(fitting, default=1.0)

    replicated = any(lane.replica > 0 for lane in timeline.lanes)
    heads = [f"stage {lane.stage}.{lane.replica}" if replicated else f"stage {lane.stage}" for lane in timeline.lanes]
    width = max(map(len, heads))
    return "\n".join(
        f"{head:<{width}}  {_row(events, scale, columns)}".rstrip() for head, events in zip(heads, rows, strict=True)
    )


def _row(events: Sequence[_Shown], scale: float, columns: int) -> str:
    """The events at `scale` columns a second. A name is extended to its event's end, and a blank follows it."""
    row = ""
    for name, start_s, end_s in events:
        start, stop = round(start_s * scale), round(end_s * scale)
        if stop > columns:
            return f"{row:<{min(start, columns)}}..."
        width = stop - start
        cell = f"{name[: max(width - 1, 1)]:-<{width - 1}} " if width > 1 else name[:width]
        row = f"{row:<{start}}{cell}"
    return row
