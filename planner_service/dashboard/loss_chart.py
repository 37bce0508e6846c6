"""Loss chart: the losses of a run by step, as a line. Pure geometry; the template writes the SVG."""

from dataclasses import dataclass

from pipeplan.simulation.report import RunReport
from planner_service.dashboard.axes import Tick, ticks

WIDTH = 1160.0
HEIGHT = 240.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 1140.0, 12.0, 208.0
MAX_POINTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChart:
    """The line's points as SVG has them, and the axes."""

    points: str
    steps: tuple[Tick, ...]
    losses: tuple[Tick, ...]
    first: float
    last: float


def loss_chart(report: RunReport) -> LossChart | None:
    """The chart; None where there is nothing to draw a line through."""
    if len(report.losses) < 2:
        return None
    every = -(-len(report.losses) // MAX_POINTS)
    values = list(enumerate(report.losses, start=report.first_step))[::every]
    low, high = _range([loss for _, loss in values])
    first, last = values[0][0], values[-1][0]

    def x(step: int) -> float:
        return LEFT + (RIGHT - LEFT) * (step - first) / (last - first)

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - low) / (high - low)

    return LossChart(
        points=" ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in values),
        steps=ticks(first, last, start=LEFT, end=RIGHT, most=min(10, last - first), label=lambda step: f"{step:g}"),
        losses=ticks(low, high, start=BOTTOM, end=TOP, most=5, label=lambda loss: f"{loss:.4g}"),
        first=report.losses[0],
        last=report.losses[-1],
    )


def _range(losses: list[float]) -> tuple[float, float]:
    low, high = min(losses), max(losses)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
