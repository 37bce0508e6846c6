"""Drawings of the overview: the throughput of a model's plans over time, and the errors of predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from statistics import median

from pipeplan.formats import minute, off, rate
from pipeplan.protocol.plans import PlanSummary
from pipeplan.protocol.runs import RunSummary

WIDTH, HEIGHT, MARGIN = 320.0, 84.0, 6.0

LEAST_SCALE = 0.05
"""A chart of errors reaches at least so far: small errors look small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A dot of a chart, and what it stands for."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Plans in the order in which they were made, and the best so far as a line. The axis begins at 0."""

    dots: tuple[Spot, ...]
    best: str
    highest_samples_per_s: float
    start: datetime
    stop: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Runs in their order, by how far they were off. `median` is of the errors without their signs."""

    dots: tuple[Spot, ...]
    zero_y: float
    scale: float
    median: float
    worst: float
    start: datetime
    stop: datetime


def history(plans: Sequence[PlanSummary]) -> History | None:
    """The throughputs of played plans, whatever their order; None where there are none."""
    known = [
        (plan.created_at, plan.throughput_samples_per_s, plan)
        for plan in sorted(plans, key=lambda plan: (plan.created_at, plan.id))
        if plan.throughput_samples_per_s is not None
    ]
    if not known:
        return None
    start, stop, most = known[0][0], known[-1][0], max(rate_ for _, rate_, _ in known)
    span_s = (stop - start).total_seconds()

    def x(at: datetime) -> float:
        share = (at - start).total_seconds() / span_s if span_s else 0.5
        return MARGIN + (WIDTH - 2 * MARGIN) * share

    def y(samples_per_s: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (samples_per_s / most if most else 0.0)

    dots = tuple(
        Spot(x=x(at), y=y(rate_), title=f"plan {plan.id[:10]}, {minute(at)}: {rate(rate_)}")
        for at, rate_, plan in known
    )
    # The best so far is a stair: it stays until a better plan is made.
    bests = list(accumulate((rate_ for _, rate_, _ in known), max))
    stair = [(dots[0].x, y(bests[0]))]
    for dot, best in zip(dots[1:], bests[1:], strict=True):
        stair += [(dot.x, stair[-1][1]), (dot.x, y(best))]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in stair)
    return History(dots=dots, best=points, highest_samples_per_s=most, start=start, stop=stop)


def errors(runs: Sequence[RunSummary]) -> Errors | None:
    """The errors of measured runs, whatever their order: measured / predicted - 1. None where there are none."""
    known = [
        (run.measured_samples_per_s / run.predicted_samples_per_s - 1, run)
        for run in sorted(runs, key=lambda run: (run.created_at, run.id))
        if run.predicted_samples_per_s and run.measured_samples_per_s is not None
    ]
    if not known:
        return None
    sizes = [abs(error) for error, _ in known]
    scale, middle = max(LEAST_SCALE, *sizes), HEIGHT / 2
    distance = (WIDTH - 2 * MARGIN) / max(len(known) - 1, 1)
    dots = tuple(
        Spot(
            x=MARGIN + distance * place if len(known) > 1 else WIDTH / 2,
            y=middle - (middle - MARGIN) * error / scale,
            title=f"run {run.id[:10]} of {run.model[:100]}, {minute(run.created_at)}: "
            f"{off(run.measured_samples_per_s, run.predicted_samples_per_s)}",
        )
        for place, (error, run) in enumerate(known)
    )
    return Errors(
        dots=dots,
        zero_y=middle,
        scale=scale,
        median=median(sizes),
        worst=max((error for error, _ in known), key=abs),
        start=known[0][1].created_at,
        stop=known[-1][1].created_at,
    )
