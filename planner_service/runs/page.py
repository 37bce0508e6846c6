"""Pages of the runs: their list, and one run with what was predicted and what was measured, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.documents.plan import Plan
from pipeplan.formats import why_missed
from pipeplan.programs.timeline import Timeline
from pipeplan.protocol.jobs import JobState
from pipeplan.protocol.runs import Run, RunQuery
from pipeplan.simulation.report import RunReport
from planner_service.plans import service as plans
from planner_service.plans.drawings import Drawing, DrawnWindow, draw, last_batches, readable_s
from planner_service.platform.axes import Tick, ticks
from planner_service.platform.context import Context
from planner_service.platform.pages import page, query_of
from planner_service.platform.requests import Services
from planner_service.runs import service as runs

LEFT, RIGHT, TOP, BOTTOM = 64.0, 1140.0, 12.0, 208.0
MAX_POINTS = 1000
DRAWN_BATCHES = 3
STATES: tuple[JobState, ...] = get_args(JobState)

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChart:
    """The losses of a run by step: the line's points as SVG has them, and the axes."""

    points: str
    steps: tuple[Tick, ...]
    losses: tuple[Tick, ...]
    first: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What the page shows; drawings and losses are there once the run has succeeded."""

    run: Run
    plan: Plan
    drawings: tuple[Drawing, ...]
    losses: LossChart | None


@router.get("/runs")
def list_runs(services: Services, request: Request) -> HTMLResponse:
    """A page of the runs that pass the address's filters."""
    return page(request, "runs/runs.html", runs=runs.page(services, query_of(RunQuery, request)), states=STATES)


@router.get("/runs/{run_id}")
def show_run(services: Services, request: Request, run_id: str) -> HTMLResponse:
    """One run."""
    return page(request, "runs/run.html", view=run_view(services, run_id), why_missed=why_missed)


def run_view(context: Context, run_id: str) -> RunView:
    """Gathers the page's content. Raises NotFoundError."""
    run = runs.get(context, run_id)
    timelines = runs.timelines(context, run_id) if run.report is not None else {}

    windows = windows_of(timelines)
    drawings = [draw(timeline, windows[name], title=name.capitalize()) for name, timeline in timelines.items()]

    return RunView(
        run=run,
        plan=plans.get(context, run.plan_id),
        drawings=tuple(drawings),
        losses=None if run.report is None else loss_chart(run.report),
    )


def windows_of(timelines: Mapping[str, Timeline]) -> dict[str, DrawnWindow]:
    """What to draw of each timeline: its end, where the pipeline is warm. All windows are equally long: one scale.

    Where bars would be too narrow to tell apart, that is as much as can be read of one of them at least.
    """
    windows = {name: last_batches(timeline, DRAWN_BATCHES) for name, timeline in timelines.items()}
    shown_s = max((readable_s(timeline, windows[name]) for name, timeline in timelines.items()), default=0.0)
    return {name: replace(window.tail(shown_s), span_s=shown_s) for name, window in windows.items()}


def loss_chart(report: RunReport) -> LossChart | None:
    """The chart; None where there is nothing to draw a line through. Pure geometry: the template writes the SVG."""
    if len(report.losses) < 2:
        return None
    every = -(-len(report.losses) // MAX_POINTS)
    values = list(enumerate(report.losses, start=report.first_step))[::every]
    low, high = min(loss for _, loss in values), max(loss for _, loss in values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin
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
