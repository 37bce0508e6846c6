"""Page of the overview, the first page: the best plans, how good predictions are, running and failed jobs."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.overview import service as overview
from planner_service.overview.drawings import errors, history
from planner_service.plans import service as plans
from planner_service.platform.listing import Cut
from planner_service.platform.pages import page
from planner_service.platform.requests import Services
from planner_service.runs import service as runs

SHOWN = Cut(limit=5)

router = APIRouter()


@router.get("/")
def show_overview(services: Services, request: Request) -> HTMLResponse:
    """The first page: its summaries, and the newest plans and runs."""
    seen = overview.glance(services)
    return page(
        request,
        "overview/overview.html",
        seen=seen,
        models=[(model, history(model.newest)) for model in seen.models],
        errors=errors(seen.measured),
        plans=plans.newest(services, SHOWN),
        runs=runs.newest(services, SHOWN),
    )
