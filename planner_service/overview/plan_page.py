"""Page of one plan: the plan, its predicted schedule, its profile and cluster, its runs and aliases."""

import json
from dataclasses import dataclass
from shlex import quote
from statistics import fmean
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.costs.memory import rank_host_bytes, stages_by_rank
from pipeplan.documents.plan import Alternative, Plan, Worker
from pipeplan.documents.profile import Model
from pipeplan.formats import layout, memory_items
from pipeplan.protocol.plans import Alias, AliasQuery, PlanRequest, PlanSummary, Streams
from pipeplan.protocol.runs import RunSummary
from planner_service.aliases import service as aliases
from planner_service.plans import exports
from planner_service.plans import service as plans
from planner_service.plans.charts import (
    DEGREES,
    FrontChart,
    MemoryChart,
    SearchMap,
    front_chart,
    memory_chart,
    search_map,
)
from planner_service.plans.drawings import StageDrawing, stage_drawing
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
MOST_ROWS = 16
"""Longer tables of stages are folded: their chart is above them."""
SHOWN_RUNS = Cut(limit=20)
SHOWN_ALIASES = 20
MOST_SHOWN_WORKERS = 32
MOST_SHOWN_MICROBATCHES = 1_024
"""The upper bound on the instructions of all workers together that the page writes out."""
MOST_SHOWN_RANKS = 256

TOKENS = "worker_agent.models.text:random_tokens?vocab_size=256"
YOURS = "package.module:factory"
NO_DECODERS = ("bert", "vit")
"""The Hugging Face families whose batches are not tokens with the tokens that follow them."""

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """A rank's figures in the play; None if the plan was not played."""

    rank: int
    worker: Worker
    busy_fraction: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """The page's content. 0 batches: the plan is too large to be played for a page."""

    summary: PlanSummary
    plan: Plan
    batches: int
    stages: StageDrawing | None
    memory: tuple[tuple[str, tuple[int, ...]], ...]
    host_bytes: int
    layout: str
    front: FrontChart | None
    stacks: MemoryChart
    search: SearchMap
    busy: tuple[float | None, ...]
    ranks: tuple[RankRow, ...]
    capacity_bytes: int
    streams: Streams | None
    alternatives: tuple[Alternative, ...]
    hidden_alternatives: int
    runs: tuple[RunSummary, ...]
    aliases: tuple[Alias, ...]
    request: PlanRequest
    exports: tuple[Offer, ...]
    known_data: bool
    names: str
    names_in_json: str


@router.get("/plans/{plan_id}")
def show_plan(services: Services, request: Request, plan_id: str) -> HTMLResponse:
    """One plan; with `alternatives=all`, all configurations considered, as far as a page can hold them.

    `across` and `down` name the degrees of the search's map.
    """
    shown = MOST_ALTERNATIVES if request.query_params.get("alternatives") == "all" else SHOWN_ALTERNATIVES
    asked = request.query_params
    view = plan_view(services, plan_id, shown, asked.get("across") or None, asked.get("down") or None)
    limits = {"most_alternatives": MOST_ALTERNATIVES, "most_rows": MOST_ROWS}
    return page(request, "overview/plan.html", view=view, degrees=tuple(DEGREES), **limits)


def plan_view(
    context: Context,
    plan_id: str,
    shown_alternatives: int = SHOWN_ALTERNATIVES,
    across: str | None = None,
    down: str | None = None,
) -> PlanView:
    """Gathers the page's content; `across` and `down` are the degrees of the search's map. Raises NotFoundError."""
    plan = plans.get(context, plan_id)
    capacities = plans.capacities(context, plan)
    others = tuple(dict.fromkeys(plan.alternatives))  # those that were not searched may be equal
    # Enough batches to show the steady state, and no more than the service plays.
    enough = -(-(DRAWN_MICROBATCHES + 2 * plan.depth) // plan.microbatches)
    batches = min(max(2, enough), MOST_DRAWN_BATCHES, plans.playable_batches(plan))
    short = plan.microbatches * plan.workers <= MOST_SHOWN_MICROBATCHES and plan.workers <= MOST_SHOWN_WORKERS
    data = _data_for(plan.model)
    specs = (plan.model.spec or YOURS, data or YOURS)
    return PlanView(
        summary=plans.summary(context, plan_id),
        plan=plan,
        batches=batches,
        stages=stage_drawing(plan),
        memory=tuple((name, tuple(held)) for name, held in memory_items(plan)),
        host_bytes=max(rank_host_bytes(plan)),
        layout=layout(plan),
        front=front_chart(plan),
        stacks=memory_chart(plan, capacities),
        search=search_map(plan, across, down),
        busy=_busy_by_stage(plan),
        ranks=_ranks(plan),
        capacity_bytes=min(capacities),
        streams=plans.streams(context, plan_id, 1) if batches and short else None,
        alternatives=others[:shown_alternatives],
        hidden_alternatives=max(len(others) - shown_alternatives, 0),
        runs=runs.newest(context, SHOWN_RUNS, plan_id).items,
        aliases=aliases.page(context, AliasQuery(plan_id=plan_id, limit=SHOWN_ALIASES)).items,
        request=plans.request(context, plan_id),
        exports=exports.offers(context, plan_id, plan),
        known_data=bool(data),
        names=_names(*specs),
        names_in_json=_names(*(json.dumps(spec, ensure_ascii=False)[1:-1] for spec in specs)),
    )


def _names(model: str, data: str) -> str:
    return f"model={quote(model)}\ndata={quote(data)}"


def _data_for(model: Model) -> str:
    """The worker's random data for such a model; empty if only the user's own data fits."""
    factory, _, options = (model.spec or "").partition("?")
    if factory == "preset:mlp":
        width = dict(parse_qsl(options)).get("width")
        return "preset:regression" + (f"?width={width}" if width else "")
    return TOKENS if factory.startswith("hf:") and factory.removeprefix("hf:") not in NO_DECODERS else ""


def _ranks(plan: Plan) -> tuple[RankRow, ...]:
    """The plan's first ranks, each with its play's figures."""
    played = plan.simulated
    known = played is not None and len(played.busy_fraction) == len(played.peak_memory_bytes) == len(plan.placement)
    return tuple(
        RankRow(
            rank=rank,
            worker=worker,
            busy_fraction=played.busy_fraction[rank] if played and known else None,
            peak_memory_bytes=played.peak_memory_bytes[rank] if played and known else None,
        )
        for rank, worker in enumerate(plan.placement[:MOST_SHOWN_RANKS])
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
