"""The aliases: names that point at plans."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.contract.aliases import AliasQuery
from planner_service.dashboard.queries import query_of
from planner_service.dashboard.rendering import page
from planner_service.services import aliases

router = APIRouter()


@router.get("/aliases")
def list_aliases(services: Services, request: Request) -> HTMLResponse:
    """A page of the aliases that pass the address's filters."""
    return page(request, "aliases.html", aliases=aliases.page(services, query_of(AliasQuery, request)))
