"""Plans side by side: what differs first, why one is faster, their stages and their memory drawn on one scale."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.contract.plans import PlanSummary
from planner_service.core.errors import require
from planner_service.core.plan import Plan, StageMemory
from planner_service.dashboard.formats import NONE, count, percent, rate, seconds, shape, size, times
from planner_service.dashboard.memory_drawing import MemoryBar, fullest, memory_bar
from planner_service.dashboard.pace import NEGLIGIBLE, pace, why_faster
from planner_service.dashboard.rendering import page
from planner_service.dashboard.stage_drawing import StageDrawing, stage_drawing
from planner_service.services import plans
from planner_service.services.context import Context

MOST = 4
NEAR = 1e-6
"""Quantities that differ by less, as a share, are the same for a reader."""

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity of all plans; `best` are the places of those that no other beats, where there is a best."""

    label: str
    values: tuple[str, ...]
    best: tuple[int, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether any plan has another value than the first."""
        return len(set(self.values)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A plan beside the fastest: how many times as fast that is (None: as fast), and why."""

    plan_id: str
    ratio: str | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the page shows. `fastest` is a place in `summaries`."""

    summaries: tuple[PlanSummary, ...]
    fastest: int
    against: tuple[Against, ...]
    differing: tuple[Row, ...]
    equal: tuple[Row, ...]
    stages: tuple[StageDrawing | None, ...]
    memory: tuple[MemoryBar, ...]
    memory_rows: tuple[Row, ...]
    one_model: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantity:
    """A row before it is filled in: what to show of a plan, and what to rank by, the smallest first."""

    label: str
    shown: Callable[[Plan], str]
    rank: Callable[[Plan], float] | None = None


_QUANTITIES = (
    _Quantity(
        label="Predicted throughput",
        shown=lambda plan: rate(plan.throughput_samples_per_s),
        rank=lambda plan: -plan.throughput_samples_per_s,
    ),
    _Quantity(
        label="Simulated throughput",
        shown=lambda plan: rate(plan.simulated.throughput_samples_per_s if plan.simulated else None),
    ),
    _Quantity(label="Bubble", shown=lambda plan: percent(plan.bubble_fraction), rank=lambda plan: plan.bubble_fraction),
    _Quantity(
        label="Devices' time that is compute",
        shown=lambda plan: percent(pace(plan).busy),
        rank=lambda plan: -pace(plan).busy,
    ),
    _Quantity(
        label="Compute a sample",
        shown=lambda plan: seconds(pace(plan).compute_s_per_sample),
        rank=lambda plan: pace(plan).compute_s_per_sample,
    ),
    _Quantity(
        label="Memory of the fullest device",
        shown=lambda plan: size(plan.stages[fullest(plan)].memory_bytes),
        rank=lambda plan: plan.stages[fullest(plan)].memory_bytes,
    ),
    _Quantity(label="Time a microbatch", shown=lambda plan: seconds(plan.time_per_microbatch_s)),
    _Quantity(label="Workers", shown=lambda plan: count(plan.workers), rank=lambda plan: plan.workers),
    _Quantity(label="Stages × replicas", shown=lambda plan: shape(plan.depth, plan.width)),
    _Quantity(label="Schedule", shown=lambda plan: plan.schedule),
    _Quantity(label="Batch", shown=lambda plan: count(plan.batch_size)),
    _Quantity(label="Microbatch size", shown=lambda plan: count(plan.microbatch_size)),
    _Quantity(label="Microbatches a batch", shown=lambda plan: count(plan.microbatches)),
    _Quantity(label="In flight at best", shown=lambda plan: count(plan.optimal_in_flight)),
    _Quantity(label="Recomputes", shown=lambda plan: "yes" if plan.recompute else "no"),
    _Quantity(label="Backward split (2BP)", shown=lambda plan: "yes" if plan.split_backward else "no"),
    _Quantity(label="Planner", shown=lambda plan: plan.planner),
    _Quantity(label="Cost model", shown=lambda plan: plan.cost_model),
    _Quantity(label="Optimizer", shown=lambda plan: plan.optimizer),
    _Quantity(label="Numbers", shown=lambda plan: plan.dtype),
    _Quantity(label="Memory accounted as", shown=lambda plan: plan.memory_accounting),
    _Quantity(label="Profile", shown=lambda plan: plan.profile_id[:10]),
    _Quantity(label="Cluster", shown=lambda plan: plan.cluster_id[:10]),
    _Quantity(label="Calibration", shown=lambda plan: (plan.calibration_id or NONE)[:10]),
    _Quantity(label="Costs", shown=lambda plan: "estimated" if plan.estimated else "measured"),
    _Quantity(label="Model", shown=lambda plan: plan.model.name),
)


@router.get("/compare")
def compare(services: Services, request: Request) -> HTMLResponse:
    """The plans that the URL names with `plan`, in that order; without any, how to choose them."""
    chosen = list(dict.fromkeys(filter(None, request.query_params.getlist("plan"))))
    require(len(chosen) <= MOST, "plan", f"must name at most {MOST} plans to compare", len(chosen))
    view = comparison(services, tuple(chosen)) if len(chosen) > 1 else None
    return page(request, "compare.html", view=view, chosen=chosen)


def comparison(context: Context, plan_ids: tuple[str, ...]) -> Comparison:
    """Gathers the page's content. Raises NotFoundError."""
    found = [plans.get(context, plan_id) for plan_id in plan_ids]
    fastest = max(range(len(found)), key=lambda place: (found[place].throughput_samples_per_s, -place))
    rows = [_row(quantity, found) for quantity in _QUANTITIES]
    most_bytes = max(plan.stages[fullest(plan)].memory_bytes for plan in found)
    return Comparison(
        summaries=tuple(plans.summary(context, plan_id) for plan_id in plan_ids),
        fastest=fastest,
        against=tuple(
            _against(plan_ids[place], found[fastest], plan) for place, plan in enumerate(found) if place != fastest
        ),
        differing=tuple(row for row in rows if row.differs),
        equal=tuple(row for row in rows if not row.differs),
        stages=tuple(stage_drawing(plan) for plan in found),
        memory=tuple(memory_bar(plan, most_bytes) for plan in found),
        memory_rows=_memory_rows(found),
        one_model=len({plan.model.name for plan in found}) == 1,
    )


def _row(quantity: _Quantity, found: list[Plan]) -> Row:
    ranks = [quantity.rank(plan) for plan in found] if quantity.rank else []
    best = tuple(place for place, rank in enumerate(ranks) if rank <= min(ranks) + NEAR * abs(min(ranks)) < max(ranks))
    return Row(label=quantity.label, values=tuple(quantity.shown(plan) for plan in found), best=best)


def _against(plan_id: str, fastest: Plan, plan: Plan) -> Against:
    slow = plan.throughput_samples_per_s
    ratio = fastest.throughput_samples_per_s / slow if slow > 0 else float("inf")
    shown = None if ratio < 1 + NEGLIGIBLE else times(ratio)
    return Against(plan_id=plan_id, ratio=shown, reasons=why_faster(fastest, plan))


def _memory_rows(found: list[Plan]) -> tuple[Row, ...]:
    """By item, what a worker of every plan's fullest stage holds."""
    held = [plan.stages[fullest(plan)].memory or StageMemory() for plan in found]
    rows = (
        (item.name.replace("_", " ").capitalize(), [getattr(memory, item.name) for memory in held])
        for item in fields(StageMemory)
    )
    return tuple(
        Row(label=label, values=tuple(size(value) for value in values)) for label, values in rows if any(values)
    )
