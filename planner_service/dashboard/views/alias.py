"""One alias's page: where it points, and what it pointed at before."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.errors import NotFoundError
from planner_service.api.bodies import Services
from planner_service.contract.aliases import Alias
from planner_service.contract.listing import ListQuery
from planner_service.dashboard.queries import query_of
from planner_service.dashboard.rendering import page
from planner_service.services import aliases
from planner_service.services.context import Context

router = APIRouter()


@router.get("/aliases/{name:path}")
def show_alias(services: Services, request: Request, name: str) -> HTMLResponse:
    """One alias and a page of its history, which outlives it."""
    moves = aliases.history(services, name, query_of(ListQuery, request))
    return page(request, "alias.html", name=name, alias=_present(services, name), moves=moves)


def _present(context: Context, name: str) -> Alias | None:
    """The alias; None for one that was deleted."""
    try:
        return aliases.get(context, name)
    except NotFoundError:
        return None
