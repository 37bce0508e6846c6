"""The runs."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.dashboard.addresses import address_of
from planner_service.dashboard.rendering import page
from planner_service.services import runs
from planner_service.storage.listing import Cut

SHOWN = 50

router = APIRouter()


@router.get("/runs")
def list_runs(services: Services, request: Request) -> HTMLResponse:
    """A page of the runs that pass the address's filters."""
    address = address_of(request)
    cut = Cut(limit=SHOWN, cursor=address.value("cursor") or None)
    return page(request, "runs.html", runs=runs.newest(services, cut, address.value("plan_id") or None))
