"""Page of the overview, the first page: what is under way, and the newest plans and runs."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.jobs import service as jobs
from planner_service.plans import service as plans
from planner_service.platform.listing import Cut
from planner_service.platform.pages import page
from planner_service.platform.requests import Services
from planner_service.runs import service as runs

SHOWN = Cut(limit=10)

router = APIRouter()


@router.get("/")
def overview(services: Services, request: Request) -> HTMLResponse:
    """Plans, runs, and the jobs that are under way."""
    return page(
        request,
        "overview/overview.html",
        plans=plans.newest(services, SHOWN),
        runs=runs.newest(services, SHOWN),
        jobs=jobs.newest(services, SHOWN, ("queued", "leased")),
    )
