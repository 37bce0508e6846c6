"""The plan history."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.core.plan import SCHEDULES
from planner_service.dashboard.addresses import address_of
from planner_service.dashboard.rendering import page
from planner_service.services import plans
from planner_service.storage.listing import Cut

SHOWN = 50

router = APIRouter()


@router.get("/plans")
def history(services: Services, request: Request) -> HTMLResponse:
    """A page of the plans that pass the address's filters."""
    cursor = address_of(request).value("cursor") or None
    return page(
        request,
        "plans.html",
        plans=plans.newest(services, Cut(limit=SHOWN, cursor=cursor)),
        schedules=SCHEDULES,
    )
