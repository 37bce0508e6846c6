"""The jobs: the queue by state."""

from typing import get_args

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.contract.jobs import JobState
from planner_service.core.errors import require
from planner_service.dashboard.addresses import address_of
from planner_service.dashboard.rendering import page
from planner_service.services import jobs
from planner_service.storage.listing import Cut

SHOWN = 50
STATES: tuple[JobState, ...] = get_args(JobState)

router = APIRouter()


@router.get("/jobs")
def list_jobs(services: Services, request: Request) -> HTMLResponse:
    """A page of the jobs; of one state where the address names one."""
    address = address_of(request)
    wanted = address.value("state")
    states = tuple(state for state in STATES if state == wanted)
    require(bool(states) or not wanted, "state", f"must be one of {', '.join(STATES)}", wanted)
    found = jobs.newest(services, Cut(limit=SHOWN, cursor=address.value("cursor") or None), states)
    return page(request, "jobs.html", jobs=found, states=STATES)
