"""Routes of the clusters."""

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from planner_service.api.auth import scope
from planner_service.api.bodies import Page, Services, document, mark_created, raw_json
from planner_service.contract.clusters import ClusterSummary
from planner_service.contract.listing import Page as PageOf
from planner_service.core.cluster import Cluster
from planner_service.services import clusters

router = APIRouter(prefix="/v1/clusters", tags=["clusters"])


@router.post(
    "",
    dependencies=[scope("plan")],
    status_code=201,
    responses={200: {"model": ClusterSummary, "description": "It was there before"}},
)
def create_cluster(
    services: Services, cluster: Annotated[Cluster, Depends(document(Cluster))], response: Response
) -> ClusterSummary:
    """Stores a cluster. The same content has the same id and is stored once."""
    summary, new = clusters.create(services, cluster)
    mark_created(response, new, f"/v1/clusters/{summary.id}")
    return summary


@router.get("", dependencies=[scope("read")])
def list_clusters(services: Services, page: Page) -> PageOf[ClusterSummary]:
    """The clusters, newest first."""
    return clusters.newest(services, page)


@router.get("/{cluster_id}", dependencies=[scope("read")], response_model=Cluster)
def get_cluster(services: Services, cluster_id: str) -> Response:
    """A cluster's document."""
    return raw_json(clusters.document(services, cluster_id))
