"""One run's page: what was predicted and what was measured, side by side."""

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.programs.timeline import Timeline
from planner_service.api.bodies import Services
from planner_service.contract.runs import Run
from planner_service.dashboard.loss_chart import LossChart, loss_chart
from planner_service.dashboard.rendering import page
from planner_service.dashboard.schedule_drawing import Drawing, Window, draw, last_batches, readable_s
from planner_service.services import plans, runs
from planner_service.services.context import Context

DRAWN_BATCHES = 3


router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What the page shows; drawings and losses are there once the run has succeeded."""

    run: Run
    schedule: str
    drawings: tuple[Drawing, ...]
    losses: LossChart | None


@router.get("/runs/{run_id}")
def show_run(services: Services, request: Request, run_id: str) -> HTMLResponse:
    """One run."""
    return page(request, "run.html", view=run_view(services, run_id))


def run_view(context: Context, run_id: str) -> RunView:
    """Gathers the page's content. Raises NotFoundError."""
    run = runs.get(context, run_id)
    timelines = runs.timelines(context, run_id) if run.report is not None else {}
    return RunView(
        run=run,
        schedule=plans.summary(context, run.plan_id).schedule,
        drawings=_drawings(timelines),
        losses=None if run.report is None else loss_chart(run.report),
    )


def _drawings(timelines: dict[str, Timeline]) -> tuple[Drawing, ...]:
    """Both at their ends, where the pipeline is warm, on one scale, so that the longer one is longer."""
    windows = {name: last_batches(timeline, DRAWN_BATCHES) for name, timeline in timelines.items()}
    readable = [readable_s(timeline, windows[name]) for name, timeline in timelines.items()]
    longest_s = max((window.span_s for window in windows.values()), default=0.0)
    dense = any(span_s < windows[name].span_s for name, span_s in zip(windows, readable, strict=True))
    span_s = max(readable) if dense else longest_s

    def shown(window: Window) -> Window:
        return window.tail(span_s) if dense else Window(start_s=window.start_s, span_s=span_s)

    return tuple(draw(timeline, shown(windows[name]), title=name.capitalize()) for name, timeline in timelines.items())
