"""The jobs: the queue by state."""

from typing import get_args

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.contract.jobs import JobQuery, JobState
from planner_service.dashboard.queries import query_of
from planner_service.dashboard.rendering import page
from planner_service.services import jobs

STATES: tuple[JobState, ...] = get_args(JobState)

router = APIRouter()


@router.get("/jobs")
def list_jobs(services: Services, request: Request) -> HTMLResponse:
    """A page of the jobs that pass the address's filters."""
    return page(request, "jobs.html", jobs=jobs.page(services, query_of(JobQuery, request)), states=STATES)
