"""Picture: a timeline as SVG, with a row for each worker, in the style of the papers' figures.

Compute and updates are boxes with their text form, without the weight version. Idle time is left blank.
"""

from html import escape

from pipeplan.programs.instructions import Instruction, Update, is_compute
from pipeplan.programs.text import format_instruction
from pipeplan.programs.timeline import Timeline

_ROW, _HEAD, _MARGIN = 26, 74, 8
"""The height of a row, the width of its head and the margin, in points."""

_LETTER = 6.5
"""The width of a letter, in points."""

_COLOURS = {
    "Forward": "#3d7ff5",
    "Recompute": "#8f7ae8",
    "Backward": "#26a17b",
    "BackwardInput": "#1f8f8f",
    "BackwardWeight": "#6d9e30",
    "Update": "#c97a1c",
}


def draw_svg(timeline: Timeline, *, width: int = 900) -> str:
    """The whole timeline as one SVG document, `width` points wide. Times are exact to a tenth of a point."""
    first_s = min((lane.start_s[0] for lane in timeline.lanes if lane.start_s), default=0.0)
    scale = (width - _HEAD - 2 * _MARGIN) / max(timeline.makespan_s, 1e-300)
    height = 2 * _MARGIN + _ROW * len(timeline.lanes)
    replicated = any(lane.replica > 0 for lane in timeline.lanes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for row, lane in enumerate(timeline.lanes):
        y = _MARGIN + _ROW * row
        head = f"stage {lane.stage}.{lane.replica}" if replicated else f"stage {lane.stage}"
        lines.append(f'<text x="{_MARGIN}" y="{y + 16}" fill="#596579">{head}</text>')
        lines.append(f'<rect x="{_HEAD}" y="{y}" width="{width - _HEAD - _MARGIN}" height="22" fill="#eef1f5"/>')
        for instruction, start_s, end_s in zip(lane.instructions, lane.start_s, lane.end_s, strict=True):
            if end_s > start_s and (is_compute(instruction) or isinstance(instruction, Update)):
                x, across = _HEAD + scale * (start_s - first_s), scale * (end_s - start_s)
                lines.append(_box(instruction, x, y, across))
    return "\n".join([*lines, "</svg>"])


def _box(instruction: Instruction, x: float, y: int, width: float) -> str:
    """One instruction; its name is written where it fits, and shown by the pointer in any case."""
    name = escape(format_instruction(instruction).partition("@")[0])
    colour = _COLOURS[type(instruction).__name__]
    rect = f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.8, 0.4):.1f}" height="22" fill="{colour}"/>'
    fits = len(name) * _LETTER <= width
    text = f'<text x="{x + width / 2:.1f}" y="{y + 15}" fill="#ffffff" text-anchor="middle">{name}</text>'
    return f"<g><title>{name}</title>{rect}{text if fits else ''}</g>"
