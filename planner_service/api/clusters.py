"""Routes of the clusters."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from pipeplan.documents.cluster import Cluster
from planner_service.api.auth import scope
from planner_service.api.bodies import MEBIBYTE, Services, mark_created, sent, takes
from planner_service.api.caching import UNCHANGED, Lane, document_response, stored
from planner_service.api.listing import page_response
from planner_service.contract.clusters import ClusterQuery, ClusterSummary
from planner_service.contract.listing import Page
from planner_service.services import clusters
from planner_service.storage.clusters import PackedCluster

router = APIRouter(prefix="/v1/clusters", tags=["clusters"])

DOCUMENT = Lane(noun="clusters", path="/v1/clusters/{cluster_id}", scopes=("read",), load=clusters.document)


@router.post(
    "",
    dependencies=[scope("plan"), takes(MEBIBYTE)],
    status_code=201,
    responses={200: {"model": ClusterSummary, "description": "It was there before"}},
)
def create_cluster(
    services: Services, cluster: Annotated[PackedCluster, Depends(sent(clusters.read))], response: Response
) -> ClusterSummary:
    """Stores a cluster. The same content has the same id and is stored once."""
    summary, new = clusters.keep(services, cluster)
    mark_created(response, new, f"/v1/clusters/{summary.id}")
    return summary


@router.get("", dependencies=[scope("read")], response_model=Page[ClusterSummary])
def list_clusters(services: Services, query: Annotated[ClusterQuery, Query()]) -> Response:
    """The clusters: newest first, or in the order asked for; those that pass all filters."""
    return page_response(clusters.page(services, query))


@router.get("/{cluster_id}", dependencies=[scope(*DOCUMENT.scopes)], response_model=Cluster, responses=UNCHANGED)
def get_cluster(services: Services, request: Request, cluster_id: str) -> Response:
    """A cluster's document. It never changes: its id is its entity tag."""
    content = stored(services, DOCUMENT.noun, cluster_id, clusters.document)
    return document_response(request, cluster_id, lambda: content)
