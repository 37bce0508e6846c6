"""The clusters."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.contract.clusters import ClusterQuery
from planner_service.dashboard.queries import query_of
from planner_service.dashboard.rendering import page
from planner_service.services import clusters

router = APIRouter()


@router.get("/clusters")
def list_clusters(services: Services, request: Request) -> HTMLResponse:
    """A page of the clusters that pass the address's filters."""
    query = query_of(ClusterQuery, request)
    return page(request, "clusters.html", clusters=clusters.page(services, query))
