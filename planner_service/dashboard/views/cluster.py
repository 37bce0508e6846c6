"""One cluster's page: its levels, drawn and as a table."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse
from planner_service.api.bodies import Services
from planner_service.dashboard.cluster_drawing import cluster_drawing
from planner_service.dashboard.rendering import page
from planner_service.services import clusters

router = APIRouter()


@router.get("/clusters/{cluster_id}")
def show_cluster(services: Services, request: Request, cluster_id: str) -> HTMLResponse:
    """One cluster."""
    cluster = parse(Cluster, clusters.document(services, cluster_id))
    drawing = cluster_drawing(cluster)
    return page(request, "cluster.html", id=cluster_id, cluster=cluster, drawing=drawing)
