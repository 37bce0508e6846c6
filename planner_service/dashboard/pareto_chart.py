"""Pareto chart: throughput against memory, the front's plans as dots. Pure geometry; the template writes the SVG."""

from dataclasses import dataclass

from pipeplan.documents.plan import Plan
from planner_service.dashboard.axes import Tick, memory_ticks, ticks
from planner_service.dashboard.formats import rate, size

HEIGHT = 240.0
LEFT, RIGHT, TOP, BOTTOM = 92.0, 1140.0, 14.0, 206.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A plan of the front; `chosen` is the answer."""

    x: float
    y: float
    title: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoChart:
    """The dots, the line through them as SVG has it, and the axes."""

    dots: tuple[Dot, ...]
    points: str
    memory: tuple[Tick, ...]
    rates: tuple[Tick, ...]


def pareto_chart(plan: Plan) -> ParetoChart | None:
    """The chart; None where the answer stands alone."""
    front = [(each, each.memory_bytes or 0, each.throughput_samples_per_s or 0.0) for each in plan.pareto]
    if len(front) < 2:
        return None
    most_bytes, most_rate = 1.05 * max(held for _, held, _ in front), 1.1 * max(fast for _, _, fast in front)

    def x(held_bytes: float) -> float:
        return LEFT + (RIGHT - LEFT) * held_bytes / most_bytes

    def y(samples_per_s: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * samples_per_s / most_rate

    dots = tuple(
        Dot(
            x=x(held),
            y=y(fast),
            title=f"{each.schedule}, {each.depth} × {each.width or 'mixed'}, microbatches of {each.microbatch_size}"
            f"{', recomputing' if each.recompute else ''}: {rate(fast)}, {size(held)} a device",
            chosen=index == 0,
        )
        for index, (each, held, fast) in enumerate(front)
    )
    return ParetoChart(
        dots=dots,
        points=" ".join(f"{dot.x:.1f},{dot.y:.1f}" for dot in dots),
        memory=memory_ticks(most_bytes, start=LEFT, end=RIGHT, most=8),
        rates=ticks(0.0, most_rate, start=BOTTOM, end=TOP, most=5, label=lambda value: f"{value:g}"),
    )
