"""Pace: why one plan is faster than another, as three factors whose product is the ratio of their throughputs.

Samples a second = workers * busy / compute: `workers` devices spend the share `busy` of their time on forwards and
backwards, and a sample takes `compute_s_per_sample` device-seconds of these. The first and the last are read off the
plan, so that `busy` holds all the rest: the bubble, stages that wait for a slower one, transfers and updates.
"""

from dataclasses import dataclass

from planner_service.core.plan import Plan
from planner_service.dashboard.formats import percent, seconds, times

NEGLIGIBLE = 0.005
"""A factor that is nearer to 1 is not worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The three factors of a plan's predicted throughput."""

    workers: int
    busy: float
    compute_s_per_sample: float


def pace(plan: Plan) -> Pace:
    """Reads them off a plan."""
    compute_s = sum(
        (costs.forward_s + costs.backward_s + (costs.recompute_s if stage.recompute else 0.0)) / costs.microbatch_size
        for stage, costs in zip(plan.stages, plan.costs, strict=True)
    )
    return Pace(
        workers=plan.workers,
        busy=plan.throughput_samples_per_s * compute_s / plan.workers,
        compute_s_per_sample=compute_s,
    )


def why_faster(faster: Plan, slower: Plan) -> tuple[str, ...]:
    """What makes the first plan faster, or holds it back: the strongest factor first. Empty where nothing differs."""
    mine, other = pace(faster), pace(slower)
    factors = [
        (_ratio(mine.workers, other.workers), f"{mine.workers} devices compute instead of {other.workers}"),
        (
            _ratio(mine.busy, other.busy),
            f"its devices compute {percent(mine.busy)} of the time instead of {percent(other.busy)}",
        ),
        (
            _ratio(other.compute_s_per_sample, mine.compute_s_per_sample),
            f"a sample takes {seconds(mine.compute_s_per_sample)} of compute "
            f"instead of {seconds(other.compute_s_per_sample)}",
        ),
    ]
    told = [(factor, words) for factor, words in factors if abs(factor - 1) > NEGLIGIBLE]
    told.sort(key=lambda each: -max(each[0], 1 / each[0]))
    return tuple(f"{words} ({times(factor)})" for factor, words in told)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if numerator > 0 and denominator > 0 else 1.0
