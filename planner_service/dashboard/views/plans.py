"""The plan history."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.documents.plan import SCHEDULES
from planner_service.api.bodies import Services
from planner_service.contract.plans import PlanQuery
from planner_service.dashboard.queries import query_of
from planner_service.dashboard.rendering import page
from planner_service.services import plans

router = APIRouter()


@router.get("/plans")
def history(services: Services, request: Request) -> HTMLResponse:
    """A page of the plans that pass the address's filters."""
    query = query_of(PlanQuery, request)
    return page(
        request,
        "plans.html",
        plans=plans.page(services, query),
        schedules=SCHEDULES,
    )
