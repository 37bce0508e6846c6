"""Pages of the aliases: their list, and where one points and has pointed before."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.errors import NotFoundError
from pipeplan.protocol.listing import ListQuery
from pipeplan.protocol.plans import AliasQuery
from planner_service.aliases import service as aliases
from planner_service.platform.pages import page, query_of
from planner_service.platform.requests import Services

router = APIRouter()


@router.get("/aliases")
def list_aliases(services: Services, request: Request) -> HTMLResponse:
    """A page of the aliases that pass the address's filters."""
    return page(request, "aliases/aliases.html", aliases=aliases.page(services, query_of(AliasQuery, request)))


@router.get("/aliases/{name:path}")
def show_alias(services: Services, request: Request, name: str) -> HTMLResponse:
    """One alias and a page of its history, which outlives it."""
    moves = aliases.history(services, name, query_of(ListQuery, request))
    try:
        alias = aliases.get(services, name)
    except NotFoundError:
        alias = None  # it was deleted
    return page(request, "aliases/alias.html", name=name, alias=alias, moves=moves)
