"""The runs."""

from typing import get_args

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.contract.jobs import JobState
from planner_service.contract.runs import RunQuery
from planner_service.dashboard.queries import query_of
from planner_service.dashboard.rendering import page
from planner_service.services import runs

STATES: tuple[JobState, ...] = get_args(JobState)

router = APIRouter()


@router.get("/runs")
def list_runs(services: Services, request: Request) -> HTMLResponse:
    """A page of the runs that pass the address's filters."""
    return page(request, "runs.html", runs=runs.page(services, query_of(RunQuery, request)), states=STATES)
