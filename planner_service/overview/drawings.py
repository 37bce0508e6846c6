"""Drawings of the overview: the throughput of a model's plans over time, and the errors of predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from statistics import median

from pipeplan.formats import change, minute, off, rate
from pipeplan.protocol.plans import PlanSummary
from pipeplan.protocol.runs import RunSummary
from planner_service.platform.axes import Frame, Tick

CARD = Frame(6.0, 314.0, 6.0, 78.0)
"""A card of the first page, 320 x 84. Its scale stands below it as text."""

LEAST_SCALE = 0.05
"""The minimum range of a chart of errors: small errors then look small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A dot of a chart, and its meaning."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Plans in the order in which they were made, and the best so far as a line. The axis begins at 0."""

    dots: tuple[Spot, ...]
    best: str
    highest_samples_per_s: float
    ticks: tuple[Tick, ...]
    start: datetime
    stop: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Runs in order, by their error. `median` is the median of the absolute errors."""

    dots: tuple[Spot, ...]
    zero_y: float
    scale: float
    ticks: tuple[Tick, ...]
    median: float
    worst: float
    start: datetime
    stop: datetime


def history(plans: Sequence[PlanSummary], frame: Frame = CARD) -> History | None:
    """The throughputs of played plans, in any order; None where there are none."""
    known = played(plans)
    if not known:
        return None
    start, stop, most = known[0][0].created_at, known[-1][0].created_at, max(rate_ for _, rate_ in known)
    span_s = (stop - start).total_seconds()

    def y(samples_per_s: float) -> float:
        return frame.y(samples_per_s / most if most else 0.0)

    dots = tuple(
        Spot(
            x=frame.x((plan.created_at - start).total_seconds() / span_s if span_s else 0.5),
            y=y(rate_),
            title=f"plan {plan.id[:10]}, {minute(plan.created_at)}: {rate(rate_)}",
        )
        for plan, rate_ in known
    )
    # The best so far is a staircase: it stays level until a better plan is made.
    bests = list(accumulate((rate_ for _, rate_ in known), max))
    stair = [(dots[0].x, y(bests[0]))]
    for dot, best in zip(dots[1:], bests[1:], strict=True):
        stair += [(dot.x, stair[-1][1]), (dot.x, y(best))]
    return History(
        dots=dots,
        best=" ".join(f"{a:.1f},{b:.1f}" for a, b in stair),
        highest_samples_per_s=most,
        ticks=frame.rows(0.0, most, "{:g}".format),
        start=start,
        stop=stop,
    )


def played(plans: Sequence[PlanSummary]) -> list[tuple[PlanSummary, float]]:
    """The plans that were played with their throughputs in samples/s, the oldest first."""
    return [
        (plan, plan.throughput_samples_per_s)
        for plan in sorted(plans, key=lambda plan: (plan.created_at, plan.id))
        if plan.throughput_samples_per_s is not None
    ]


def errors(runs: Sequence[RunSummary], frame: Frame = CARD) -> Errors | None:
    """The errors of measured runs, in any order. None where there are none."""
    known = measured(runs)
    if not known:
        return None
    sizes = [abs(error) for _, error in known]
    scale, middle = max(LEAST_SCALE, *sizes), (frame.top + frame.bottom) / 2
    distance = (frame.right - frame.left) / max(len(known) - 1, 1)
    dots = tuple(
        Spot(
            x=frame.left + distance * place if len(known) > 1 else (frame.left + frame.right) / 2,
            y=middle - (middle - frame.top) * error / scale,
            title=f"run {run.id[:10]} of {run.model[:100]}, {minute(run.created_at)}: "
            f"{off(run.measured_samples_per_s, run.predicted_samples_per_s)}",
        )
        for place, (run, error) in enumerate(known)
    )
    return Errors(
        dots=dots,
        zero_y=middle,
        scale=scale,
        ticks=frame.rows(-scale, scale, change),
        median=median(sizes),
        worst=max((error for _, error in known), key=abs),
        start=known[0][0].created_at,
        stop=known[-1][0].created_at,
    )


def measured(runs: Sequence[RunSummary]) -> list[tuple[RunSummary, float]]:
    """The runs that were measured with their errors, measured / predicted - 1, the oldest first."""
    return [
        (run, run.measured_samples_per_s / run.predicted_samples_per_s - 1)
        for run in sorted(runs, key=lambda run: (run.created_at, run.id))
        if run.predicted_samples_per_s and run.measured_samples_per_s is not None
    ]
