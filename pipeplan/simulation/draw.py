"""Draw: a timeline as text, a row a worker, time from left to right.

stage 0  F1 F2 F3 F4          B1    B2    B3    B4
stage 1     F1 F2 F3 F4    B1    B2    B3    B4
"""

from collections.abc import Sequence

from pipeplan.programs.text import COMPUTE_LETTERS, UPDATE_LETTER
from pipeplan.programs.timeline import Lane, Timeline

_Shown = tuple[str, float, float]
"""What an instruction is called in the picture, and when it starts and ends."""


def draw(timeline: Timeline, *, columns: int, until_s: float | None = None) -> str:
    """The picture of [0, until_s) in so many columns; without `until_s` every event is as wide as its name.

    What lies beyond the last column is left out, and "..." says so. Compute and updates that take time are shown, by
    their text form without the weight version.
    """
    rows = [(lane, _shown(lane)) for lane in timeline.lanes]
    scale = columns / until_s if until_s else _natural_scale([event for _, events in rows for event in events])
    replicated = any(lane.replica > 0 for lane in timeline.lanes)
    heads = [_head(lane, replicated) for lane in timeline.lanes]
    width = max(map(len, heads))
    return "\n".join(
        f"{head:<{width}}  {_row(events, scale, columns)}".rstrip()
        for head, (_, events) in zip(heads, rows, strict=True)
    )


def _shown(lane: Lane) -> list[_Shown]:
    events = zip(lane.instructions, lane.start_s, lane.end_s, strict=True)
    return [
        (text.partition("@")[0], start_s, end_s)
        for text, start_s, end_s in events
        if end_s > start_s and (text[0] in COMPUTE_LETTERS or text[0] == UPDATE_LETTER)
    ]


def _natural_scale(events: Sequence[_Shown]) -> float:
    """Columns a second at which every name fits into its event, with a blank behind it."""
    return max(((1 + len(name)) / (end_s - start_s) for name, start_s, end_s in events), default=1.0)


def _head(lane: Lane, replicated: bool) -> str:
    return f"stage {lane.stage}.{lane.replica}" if replicated else f"stage {lane.stage}"


def _row(events: Sequence[_Shown], scale: float, columns: int) -> str:
    row = ""
    for name, start_s, end_s in events:
        start, stop = round(start_s * scale), round(end_s * scale)
        if stop > columns:
            return f"{row:<{min(start, columns)}}..."
        row = f"{row:<{start}}{_cell(name, stop - start)}"
    return row


def _cell(name: str, width: int) -> str:
    """The name, drawn out to the event's end; the last column stays blank where there is room."""
    return f"{name[: max(width - 1, 1)]:-<{width - 1}} " if width > 1 else name[:width]
