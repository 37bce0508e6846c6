"""Page of one plan: the plan, its predicted schedule, what it was made from, its runs and aliases."""

from dataclasses import dataclass
from statistics import fmean

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.costs.memory import rank_host_bytes, stages_by_rank
from pipeplan.documents.plan import Alternative, Plan
from pipeplan.formats import layout, memory_items
from pipeplan.protocol.plans import Alias, AliasQuery, PlanRequest, PlanSummary, Streams
from pipeplan.protocol.runs import RunSummary
from pipeplan.simulation.predict import predict
from planner_service.aliases import service as aliases
from planner_service.plans import exports
from planner_service.plans import service as plans
from planner_service.plans.drawings import (
    Drawing,
    ParetoChart,
    StageDrawing,
    draw,
    last_batches,
    pareto_chart,
    readable_s,
    stage_drawing,
)
from planner_service.plans.exports import Offer
from planner_service.platform.context import Context
from planner_service.platform.listing import Cut
from planner_service.platform.pages import page
from planner_service.platform.requests import Services
from planner_service.runs import service as runs

DRAWN_MICROBATCHES = 16
MOST_DRAWN_BATCHES = 16
SHOWN_ALTERNATIVES = 60
MOST_ALTERNATIVES = 2_000
SHOWN_RUNS = Cut(limit=20)
SHOWN_ALIASES = 20
MOST_SHOWN_WORKERS = 32

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """What the page shows. Without drawings, the plan is too large to be played for a page."""

    summary: PlanSummary
    plan: Plan
    batches: int
    stages: StageDrawing | None
    memory: tuple[tuple[str, tuple[int, ...]], ...]
    host_bytes: int
    layout: str
    front: ParetoChart | None
    busy: tuple[float | None, ...]
    drawings: tuple[Drawing, ...]
    streams: Streams | None
    alternatives: tuple[Alternative, ...]
    hidden_alternatives: int
    runs: tuple[RunSummary, ...]
    aliases: tuple[Alias, ...]
    request: PlanRequest
    exports: tuple[Offer, ...]


@router.get("/plans/{plan_id}")
def show_plan(services: Services, request: Request, plan_id: str) -> HTMLResponse:
    """One plan; with `alternatives=all`, all that were considered, as far as a page can hold them."""
    shown = MOST_ALTERNATIVES if request.query_params.get("alternatives") == "all" else SHOWN_ALTERNATIVES
    view = plan_view(services, plan_id, shown)
    return page(request, "overview/plan.html", view=view, most_alternatives=MOST_ALTERNATIVES)


def plan_view(context: Context, plan_id: str, shown_alternatives: int = SHOWN_ALTERNATIVES) -> PlanView:
    """Gathers the page's content. Raises NotFoundError."""
    plan = plans.get(context, plan_id)
    # Enough batches to show the steady state, and no more than the service plays.
    enough = -(-(DRAWN_MICROBATCHES + 2 * plan.depth) // plan.microbatches)
    batches = min(max(2, enough), MOST_DRAWN_BATCHES, plans.playable_batches(plan))
    drawings: tuple[Drawing, ...] = ()
    if batches:
        timeline = predict(plan, batches=batches)
        window = last_batches(timeline, batches)
        drawings = (draw(timeline, window, title=f"The first {batches} batches"),)
        beginning_s = readable_s(timeline, window)
        if beginning_s < window.span_s:  # the whole one's bars are too narrow to tell apart
            drawings = (draw(timeline, window.head(beginning_s), title="How it begins"), *drawings)

    return PlanView(
        summary=plans.summary(context, plan_id),
        plan=plan,
        batches=batches,
        stages=stage_drawing(plan),
        memory=tuple((name, tuple(held)) for name, held in memory_items(plan)),
        host_bytes=max(rank_host_bytes(plan)),
        layout=layout(plan),
        front=pareto_chart(plan),
        busy=_busy_by_stage(plan),
        drawings=drawings,
        streams=plans.streams(context, plan_id, 1) if batches and plan.workers <= MOST_SHOWN_WORKERS else None,
        alternatives=plan.alternatives[:shown_alternatives],
        hidden_alternatives=max(len(plan.alternatives) - shown_alternatives, 0),
        runs=runs.newest(context, SHOWN_RUNS, plan_id).items,
        aliases=aliases.page(context, AliasQuery(plan_id=plan_id, limit=SHOWN_ALIASES)).items,
        request=plans.request(context, plan_id),
        exports=exports.offers(context, plan_id, plan),
    )


def _busy_by_stage(plan: Plan) -> tuple[float | None, ...]:
    """The simulated busy fraction of every stage's ranks, the mean over its workers."""
    fractions = plan.simulated.busy_fraction if plan.simulated else ()
    if len(fractions) != len(plan.placement):
        return (None,) * plan.depth
    placed = list(zip(plan.placement, fractions, strict=True))
    first = {stage: stages[0] for stages in stages_by_rank(plan) for stage in stages}  # which the placement lists
    return tuple(
        fmean(fraction for worker, fraction in placed if worker.stage == first[stage]) for stage in range(plan.depth)
    )
