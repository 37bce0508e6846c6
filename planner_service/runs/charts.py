"""Charts of a run: the losses by step, and the last batches, predicted over measured. Pure geometry."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.errors import InvalidInputError
from pipeplan.programs.text import format_instruction
from pipeplan.protocol.runs import Run
from pipeplan.simulation.overlay import pairs
from pipeplan.simulation.report import RunReport
from planner_service.documents.chart_files import Row, svg_text
from planner_service.plans.drawings import Drawing, DrawnWindow, draw
from planner_service.platform.axes import Frame, Tick, ticks
from planner_service.runs.service import Overlay

FRAME = Frame(64.0, 1140.0, 12.0, 208.0)
HEIGHT = 240.0
HEADING = 24.0
"""The height of the text above each drawing of a file."""
MAX_POINTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChart:
    """The losses of a run by step: the line's points as SVG has them, and the axes."""

    points: str
    steps: tuple[Tick, ...]
    losses: tuple[Tick, ...]
    first: float
    last: float


def loss_chart(report: RunReport) -> LossChart | None:
    """The chart; None if there are too few points for a line."""
    known = (*report.earlier_losses, *report.losses)
    if len(known) < 2:
        return None
    every = -(-len(known) // MAX_POINTS)
    values = list(enumerate(known, start=report.first_loss_step))[::every]
    low, high = min(loss for _, loss in values), max(loss for _, loss in values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin
    first, last = values[0][0], values[-1][0]

    span, scale, most = last - first, high - low, min(10, last - first)
    return LossChart(
        points=" ".join(f"{FRAME.x(step - first, span):.1f},{FRAME.y(loss - low, scale):.1f}" for step, loss in values),
        steps=ticks(first, last, start=FRAME.left, end=FRAME.right, most=most, label="{:g}".format),
        losses=FRAME.rows(low, high, "{:.4g}".format),
        first=known[0],
        last=known[-1],
    )


def loss_rows(run: Run) -> Iterator[Row]:
    """A row a step."""
    yield ("step", "loss")
    if run.report is not None:
        yield from enumerate((*run.report.earlier_losses, *run.report.losses), start=run.report.first_loss_step)


def loss_svg(run: Run) -> str:
    """The picture. Raises InvalidInputError if there are fewer than two losses."""
    chart = None if run.report is None else loss_chart(run.report)
    if chart is None:
        raise InvalidInputError("chart", "cannot be drawn: the run has fewer than two losses", "loss")
    return svg_text("runs/chart.svg", title=f"Loss of run {run.id}", height=HEIGHT, loss=chart, drawings=())


def pair_rows(shown: Overlay) -> Iterator[Row]:
    """One row for each instruction, with its predicted and its measured times."""
    moments = ("predicted_start_s", "predicted_end_s", "measured_start_s", "measured_end_s")
    yield ("rank", "stage", "replica", "instruction", *moments, "longer_s")
    for pair in pairs(shown.predicted or shown.measured, shown.measured):
        known = shown.predicted is not None
        predicted = (pair.predicted_start_s, pair.predicted_end_s) if known else (None, None)
        longer_s = pair.measured_s - pair.predicted_s if known else None
        about = (pair.rank, pair.stage, pair.replica, format_instruction(pair.instruction))
        yield (*about, *predicted, pair.measured_start_s, pair.measured_end_s, longer_s)


def overlay_svg(run_id: str, shown: Overlay) -> str:
    """The picture: predicted above measured, on one scale."""
    timelines = {"Predicted": shown.predicted, "Measured": shown.measured}
    known = {name: timeline for name, timeline in timelines.items() if timeline is not None}
    window = DrawnWindow(start_s=0.0, span_s=max(timeline.makespan_s for timeline in known.values()))
    drawings: list[tuple[float, Drawing]] = []
    height = 0.0
    for name, timeline in known.items():
        drawing = draw(timeline, window, title=name, most_rows=len(timeline.lanes))
        drawings.append((height + HEADING, drawing))
        height += HEADING + drawing.height
    title = f"The last batches of run {run_id}"
    legend = dict.fromkeys(entry for _, drawing in drawings for entry in drawing.legend)
    return svg_text("runs/chart.svg", title=title, height=height, legend=legend, loss=None, drawings=drawings)
