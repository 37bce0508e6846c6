"""Routes of the runs."""

import math
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from pipeplan.documents.calibration import Calibration
from pipeplan.documents.identity import canonical_json
from pipeplan.errors import require
from pipeplan.programs.timeline_document import TimelineDocument
from pipeplan.protocol.listing import Page
from pipeplan.protocol.runs import Losses, OverlayColumns, Run, RunQuery, RunSummary
from planner_service.access.auth import scope
from planner_service.documents.caching import UNCHANGED, packed_response
from planner_service.documents.chart_files import ANSWERS, Format, chart_response, csv_text
from planner_service.platform.requests import Services, page_response, raw_json
from planner_service.runs import calibrations, charts
from planner_service.runs import service as runs
from planner_service.runs.timelines import TimelineWindow

router = APIRouter(prefix="/v1/runs", tags=["runs"], dependencies=[scope("read")])

Start = Annotated[float | None, Query(description="seconds since the run's start; default: from its start on")]
Stop = Annotated[float | None, Query(description="seconds since the run's start, not included; default: to its end")]
FirstStep = Annotated[
    int, Query(ge=0, le=2**63 - 1, description="of the run's steps, counted from the first whose loss is known")
]
LastStep = Annotated[int | None, Query(ge=0, le=2**63 - 1, description="the step after the last; default: all")]

Batches = Annotated[int, Query(ge=1, le=1000, description="how many batches, the last ones")]
Chart = Literal["loss", "timeline"]


@router.get("", response_model=Page[RunSummary])
def list_runs(services: Services, query: Annotated[RunQuery, Query()]) -> Response:
    """The runs, newest first or oldest first; those that pass all filters."""
    return page_response(runs.page(services, query))


@router.get("/calibration", response_model=Calibration)
def get_calibration(
    services: Services,
    run_id: Annotated[
        list[str], Query(alias="id", min_length=1, max_length=calibrations.MOST_RUNS, description="runs' ids")
    ],
) -> Response:
    """The corrections of their plans' profile and cluster from measured runs: a request's `calibration`."""
    return raw_json(canonical_json(calibrations.fitted(services, run_id).calibration))


@router.get("/{run_id}")
def get_run(services: Services, run_id: str) -> Run:
    """A run, with its report once it has succeeded."""
    return runs.get(services, run_id)


@router.get("/{run_id}/losses")
def get_run_losses(services: Services, run_id: str, start: FirstStep = 0, stop: LastStep = None) -> Losses:
    """The losses of the steps [start, stop), counted from the first that is known: none before it has succeeded."""
    return runs.losses(services, run_id, start, stop)


@router.get("/{run_id}/timeline", response_model=TimelineDocument)
def get_run_timeline(services: Services, run_id: str, start: Start = None, stop: Stop = None) -> Response:
    """The measured timeline: all of it, or the events that overlap the seconds [start, stop) since the run's start.

    `batches` is the whole run's. A lane without events in the window is included, empty. An answer holds at most
    250,000 instructions. If there are more, the refusal names the seconds that the timeline covers.
    """
    window = None
    if start is not None or stop is not None:
        start_s = -math.inf if start is None else start
        stop_s = math.inf if stop is None else stop
        require(start_s < stop_s, "start", f"must be less than stop ({stop_s:g})", start_s)
        window = TimelineWindow(start_s=start_s, stop_s=stop_s)
    return raw_json(canonical_json(runs.timeline(services, run_id, window)))


@router.get("/{run_id}/trace")
def get_run_trace(services: Services, run_id: str) -> Response:
    """The predicted and the measured timeline side by side, as a Chrome trace; for a very long run, the end of both."""
    return raw_json(runs.trace(services, run_id))


@router.get("/{run_id}/timeline/columns", response_model=OverlayColumns, responses=UNCHANGED)
def get_run_timeline_columns(services: Services, request: Request, run_id: str, batches: Batches = 2) -> Response:
    """The last batches, predicted and measured, as columns of small numbers, for drawing."""
    return packed_response(request, lambda: runs.overlay_packed(services, run_id, batches), run_id, "columns", batches)


@router.get("/{run_id}/charts/{chart}.{kind}", response_class=Response, responses=ANSWERS)
def get_run_chart(
    services: Services, request: Request, run_id: str, chart: Chart, kind: Format, batches: Batches = 2
) -> Response:
    """A chart of a run's page, as a table or as a picture. `batches`: the last ones, which the timeline shows."""
    run = runs.get(services, run_id)

    def make() -> str:
        if chart == "loss":
            return csv_text(charts.loss_rows(run)) if kind == "csv" else charts.loss_svg(run)
        shown = runs.overlay(services, run_id, batches)
        return csv_text(charts.pair_rows(shown)) if kind == "csv" else charts.overlay_svg(run_id, shown)

    name = f"run-{run_id[:8]}-{chart}"
    return chart_response(request, run_id, kind, name, make, run.state, batches)
