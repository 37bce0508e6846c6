"""The clusters."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.dashboard.addresses import address_of
from planner_service.dashboard.rendering import page
from planner_service.services import clusters
from planner_service.storage.listing import Cut

SHOWN = 50

router = APIRouter()


@router.get("/clusters")
def list_clusters(services: Services, request: Request) -> HTMLResponse:
    """A page of the clusters that pass the address's filters."""
    cursor = address_of(request).value("cursor") or None
    return page(request, "clusters.html", clusters=clusters.newest(services, Cut(limit=SHOWN, cursor=cursor)))
