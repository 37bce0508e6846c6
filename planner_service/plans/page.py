"""Pages of the plans: their history, and comparisons: differences, why one is faster, stages and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import inf, log

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import numbers
from pipeplan.documents.stage_memory import StageMemory
from pipeplan.errors import require
from pipeplan.formats import (
    NONE,
    all_seconds,
    all_sizes,
    count,
    percent,
    price,
    rate,
    shape,
    shared_weights,
    times,
    training,
)
from pipeplan.protocol.plans import PlanFacts, PlanQuery, PlanSummary
from pipeplan.schedules.registry import schedule_names
from planner_service.plans import comparisons
from planner_service.plans import service as plans
from planner_service.plans.drawings import MemoryBar, StageDrawing, fullest, memory_bar, stage_drawing
from planner_service.platform.context import Context
from planner_service.platform.pages import page, query_of
from planner_service.platform.requests import Services

MOST = 4
"""The upper bound on the plans that one page compares."""

NEGLIGIBLE = 0.005
"""A factor that is nearer to 1 is not mentioned."""

NEAR = 1e-6
"""Quantities that differ by a smaller share count as equal."""

router = APIRouter()


@router.get("/plans")
def history(services: Services, request: Request) -> HTMLResponse:
    """A page of the plans that pass the address's filters."""
    query = query_of(PlanQuery, request)
    found = plans.page(services, query)
    return page(request, "plans/plans.html", plans=found, schedules=schedule_names())


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One quantity of all plans; `best` are the places of the best plans, if there is a best."""

    label: str
    values: tuple[str, ...]
    best: tuple[int, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether any plan has another value than the first."""
        return len(set(self.values)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A plan compared with the fastest: the ratio (None: as fast), the prices compared, and the reasons."""

    plan_id: str
    price: str
    ratio: str | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonView:
    """The page's content. `fastest` is an index of `summaries`, `leading` are the indices of all equally fast plans.

    If all are equally fast, none leads.
    """

    summaries: tuple[PlanSummary, ...]
    fastest: int
    leading: tuple[int, ...]
    against: tuple[Against, ...]
    differing: tuple[ComparedRow, ...]
    equal: tuple[ComparedRow, ...]
    stages: tuple[StageDrawing | None, ...]
    memory: tuple[MemoryBar, ...]
    memory_rows: tuple[ComparedRow, ...]
    caveats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A row before it is filled in: the value to show, and the value to rank by, the smallest first.

    `in_one_unit` shows the ranked amounts of all plans together; `shown` is then not called.
    """

    label: str
    shown: Callable[[Plan, PlanFacts], str] = lambda plan, facts: ""
    rank: Callable[[Plan, PlanFacts], float] | None = None
    in_one_unit: Callable[[Sequence[float]], tuple[str, ...]] | None = None


_QUANTITIES = (
    _Quantity(
        "Throughput",
        lambda plan, facts: price(plan.throughput_samples_per_s),
        rank=lambda plan, facts: -(plan.throughput_samples_per_s or 0.0),
    ),
    _Quantity("Throughput in closed form", lambda plan, facts: rate(plan.closed_form.throughput_samples_per_s)),
    _Quantity(
        "Bubble",
        lambda plan, facts: percent(plan.bubble_fraction),
        rank=lambda plan, facts: inf if plan.bubble_fraction is None else plan.bubble_fraction,
    ),
    _Quantity("Bubble in closed form", lambda plan, facts: percent(plan.closed_form.bubble_fraction)),
    _Quantity(
        "Share of time computing",
        lambda plan, facts: f"{percent(facts.busy_fraction)}{'' if plan.simulated else ' in closed form'}",
        rank=lambda plan, facts: -facts.busy_fraction if plan.simulated else inf,
    ),
    _Quantity("Compute a sample", rank=lambda plan, facts: facts.compute_s_per_sample, in_one_unit=all_seconds),
    _Quantity(
        "Slowest stage a sample, its replicas together",
        rank=lambda plan, facts: facts.slowest_s_per_sample,
        in_one_unit=all_seconds,
    ),
    _Quantity(
        "Its exchange and update a sample",
        rank=lambda plan, facts: facts.exchange_s_per_sample,
        in_one_unit=all_seconds,
    ),
    _Quantity("Memory of the fullest device", rank=lambda plan, facts: max(rank_bytes(plan)), in_one_unit=all_sizes),
    _Quantity("Workers", lambda plan, facts: count(plan.workers), rank=lambda plan, facts: plan.workers),
    _Quantity("Stages × replicas", lambda plan, facts: shape(plan.depth, plan.width)),
    _Quantity("Schedule", lambda plan, facts: plan.schedule),
    _Quantity("Training", lambda plan, facts: training(plan)),
    _Quantity("Batch", lambda plan, facts: count(plan.batch_size)),
    _Quantity("Microbatch size", lambda plan, facts: count(plan.microbatch_size)),
    _Quantity("Microbatches a batch", lambda plan, facts: count(plan.microbatches)),
    _Quantity("In flight at best", lambda plan, facts: count(plan.optimal_in_flight)),
    _Quantity("Recomputes", lambda plan, facts: plan.recomputes),
    _Quantity("Stages that share weights", lambda plan, facts: shared_weights(plan)),
    _Quantity("Backward split (2BP)", lambda plan, facts: "yes" if plan.split_backward else "no"),
    _Quantity("Planner", lambda plan, facts: f"{plan.planner} {plan.planner_version}"),
    _Quantity("Cost model", lambda plan, facts: plan.cost_model),
    _Quantity("Optimizer", lambda plan, facts: plan.optimizer),
    _Quantity("Numbers", lambda plan, facts: numbers(plan.dtype, plan.autocast, plan.precision)),
    _Quantity("Memory accounted as", lambda plan, facts: plan.memory_accounting),
    _Quantity("Profile", lambda plan, facts: plan.profile_id[:10]),
    _Quantity("Cluster", lambda plan, facts: plan.cluster_id[:10]),
    _Quantity("Calibration", lambda plan, facts: (plan.calibration_id or NONE)[:10]),
    _Quantity("Costs", lambda plan, facts: "estimated" if plan.estimated else "measured"),
    _Quantity("Model", lambda plan, facts: plan.model.name),
)


@router.get("/compare")
def compare(services: Services, request: Request) -> HTMLResponse:
    """The plans that the URL names with `plan`, in that order; without any, how to choose some."""
    chosen = list(dict.fromkeys(filter(None, request.query_params.getlist("plan"))))
    require(len(chosen) <= MOST, "plan", f"must name at most {MOST} plans to compare", len(chosen))
    view = comparison(services, tuple(chosen)) if len(chosen) > 1 else None
    return page(request, "plans/compare.html", view=view, chosen=chosen)


def comparison(context: Context, plan_ids: tuple[str, ...]) -> ComparisonView:
    """Gathers the page's content. Raises NotFoundError."""
    found = [plans.get(context, plan_id) for plan_id in plan_ids]
    identified = list(zip(plan_ids, found, strict=True))
    compared = comparisons.comparison(identified)
    fastest = plan_ids.index(compared.fastest)
    pairs = list(zip(found, compared.plans, strict=True))
    rows = []
    for quantity in _QUANTITIES:
        ranks = [quantity.rank(*pair) for pair in pairs] if quantity.rank else []
        best = tuple(
            place for place, rank in enumerate(ranks) if rank <= min(ranks) + NEAR * abs(min(ranks)) < max(ranks)
        )
        values = tuple(quantity.shown(*pair) for pair in pairs)
        if quantity.in_one_unit is not None:
            values = quantity.in_one_unit(ranks)
        rows.append(ComparedRow(label=quantity.label, values=values, best=best))

    held = [plan.stages[fullest(plan)].memory or StageMemory() for plan in found]
    memory_rows = []
    for item in fields(StageMemory):
        sizes = [getattr(memory, item.name) for memory in held]
        if any(sizes):
            label = item.name.replace("_", " ").capitalize()
            memory_rows.append(ComparedRow(label=label, values=all_sizes(sizes)))

    against = tuple(_against(identified[fastest], one) for place, one in enumerate(identified) if place != fastest)
    slower = {each.plan_id for each in against if each.ratio is not None}
    leading = tuple(place for place, plan_id in enumerate(plan_ids) if slower and plan_id not in slower)
    paces_s = [comparisons.paces_s(plan) for plan in found]
    most_bytes = max(plan.stages[fullest(plan)].memory_bytes for plan in found)
    return ComparisonView(
        summaries=tuple(plans.summary(context, plan_id) for plan_id in plan_ids),
        fastest=fastest,
        leading=leading,
        against=against,
        differing=tuple(row for row in rows if row.differs),
        equal=tuple(row for row in rows if not row.differs),
        stages=tuple(
            stage_drawing(plan, its_s, max(map(max, paces_s))) for plan, its_s in zip(found, paces_s, strict=True)
        ),
        memory=tuple(memory_bar(plan, most_bytes) for plan in found),
        memory_rows=tuple(memory_rows),
        caveats=compared.caveats,
    )


def _against(fastest: tuple[str, Plan], other: tuple[str, Plan]) -> Against:
    """How much faster the fastest plan is than another, and why, the strongest factor first."""
    slower, speed = comparisons.comparison([other, fastest]).speeds
    factors = sorted(speed.because, key=lambda factor: -abs(log(factor.ratio)))
    told = [factor for factor in factors if abs(factor.ratio - 1) > NEGLIGIBLE]
    ratio = None if speed.ratio is None or speed.ratio < 1 + NEGLIGIBLE else times(speed.ratio)
    return Against(
        plan_id=slower.id,
        price=speed.price,
        ratio=ratio,
        reasons=tuple(f"{factor.text} ({times(factor.ratio)})" for factor in told),
    )
