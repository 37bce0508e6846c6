"""The first page: what is under way, and the newest plans and runs."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.dashboard.rendering import page
from planner_service.services import jobs, plans, runs
from planner_service.storage.listing import Cut

SHOWN = Cut(limit=10)

router = APIRouter()


@router.get("/")
def overview(services: Services, request: Request) -> HTMLResponse:
    """Plans, runs, and the jobs that are under way."""
    return page(
        request,
        "overview.html",
        plans=plans.newest(services, SHOWN),
        runs=runs.newest(services, SHOWN),
        jobs=jobs.newest(services, SHOWN, ("queued", "leased")),
    )
