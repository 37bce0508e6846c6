"""Pages of the runs: their list, and one run with prediction and measurement side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import get_args

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse

from pipeplan.costs.memory import stages_by_rank
from pipeplan.documents.calibration import mean_absolute_error
from pipeplan.documents.plan import Plan
from pipeplan.errors import NotFoundError, require
from pipeplan.formats import why_missed
from pipeplan.protocol.jobs import JobState
from pipeplan.protocol.runs import Run, RunQuery
from pipeplan.simulation.overlay import StageDifference, differences
from planner_service.access.auth import scope
from planner_service.plans import service as plans
from planner_service.plans.drawings import KINDS
from planner_service.plans.form_page import answer_to
from planner_service.platform.context import Context
from planner_service.platform.pages import OwnPage, page, query_of
from planner_service.platform.requests import SMALL, Form, Services, takes
from planner_service.runs import calibrations
from planner_service.runs import service as runs
from planner_service.runs.charts import LossChart, loss_chart

DRAWN_BATCHES = 3
MOST_DIFFERENCES = 200
"""Rows of the table of instructions: of a deep pipeline, the first stages."""

NAMES = KINDS | {
    "RecvActivation": "Receive an activation, with waiting",
    "RecvGradient": "Receive a gradient, with waiting",
    "SendActivation": "Send an activation",
    "SendGradient": "Send a gradient",
    "StartReduce": "Begin the gradient exchange",
}
"""The kinds of instructions in words."""

STATES: tuple[JobState, ...] = get_args(JobState)

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The page's content. Everything except run and plan is there only once the run has succeeded.

    `batches` are the last ones: those that are drawn, and whose instructions are compared.
    """

    run: Run
    plan: Plan
    batches: int = 0
    capacity_bytes: int = 0
    differences: tuple[StageDifference, ...] = ()
    losses: LossChart | None = None

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        return stages_by_rank(self.plan)


@router.get("/runs")
def list_runs(services: Services, request: Request) -> HTMLResponse:
    """A page of the runs that pass the address's filters."""
    return page(request, "runs/runs.html", runs=runs.page(services, query_of(RunQuery, request)), states=STATES)


@router.get("/runs/calibrate")
def show_calibration(services: Services, request: Request) -> HTMLResponse:
    """The corrections from the runs that the address names with `run`; the first is the one with which the user
    began."""
    chosen = _chosen(request.query_params.getlist("run"))
    run = runs.get(services, chosen[0])
    plan = plans.summary(services, run.plan_id)
    found = calibrations.fitted(services, chosen)
    errors = [(each.error_before, each.error_after) for each in found.calibration.runs]
    return page(
        request,
        "runs/calibration.html",
        run=run,
        plan=plan,
        chosen=chosen,
        found=found,
        off=tuple(mean_absolute_error(each) for each in zip(*errors, strict=True)),
        others=calibrations.others(services, run),
    )


@router.post("/runs/calibrate", dependencies=[scope("plan"), OwnPage, takes(SMALL)])
async def plan_again(request: Request, services: Services, given: Form) -> Response:
    """Makes the first run's plan again, with costs corrected by the runs of the field `runs`, and shows it."""
    chosen = _chosen(given.get("runs", "").split())
    asked = await run_in_threadpool(calibrations.request, services, chosen)
    answer = await answer_to(request, services, asked)
    place = answer.headers.get("location")
    if place is None:
        raise NotFoundError("no plan fits with the corrected costs")
    return RedirectResponse(place.removeprefix("/v1"), HTTPStatus.SEE_OTHER)


def _chosen(named: Sequence[str]) -> list[str]:
    """The named runs, each once."""
    chosen = list(dict.fromkeys(filter(None, named)))
    rule = f"must name 1 to {calibrations.MOST_RUNS} runs"
    require(1 <= len(chosen) <= calibrations.MOST_RUNS, "run", rule, len(chosen))
    return chosen


@router.get("/runs/{run_id}")
def show_run(services: Services, request: Request, run_id: str) -> HTMLResponse:
    """One run."""
    return page(request, "runs/run.html", view=run_view(services, run_id), why_missed=why_missed, kinds=NAMES)


def run_view(context: Context, run_id: str) -> RunView:
    """Gathers the page's content. Raises NotFoundError."""
    run = runs.get(context, run_id)
    plan = plans.get(context, run.plan_id)
    if run.report is None:
        return RunView(run=run, plan=plan)
    shown = runs.overlay(context, run_id, DRAWN_BATCHES)
    found = () if shown.predicted is None else differences(shown.predicted, shown.measured, stages_by_rank(plan))
    return RunView(
        run=run,
        plan=plan,
        batches=shown.measured.batches,
        capacity_bytes=min(plans.capacities(context, plan)),
        differences=found[:MOST_DIFFERENCES],
        losses=loss_chart(run.report),
    )
