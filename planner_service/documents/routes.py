"""Routes of the profiles and the clusters."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.profile import Profile
from pipeplan.protocol.documents import ClusterQuery, ClusterSummary, ProfileQuery, ProfileSummary
from pipeplan.protocol.listing import Page
from planner_service.access.auth import scope
from planner_service.documents.caching import UNCHANGED, DocumentLane, document_response, stored
from planner_service.documents.chart_files import ANSWERS, Format, chart_response
from planner_service.documents.charts import ProfileChart, cluster_file, profile_file
from planner_service.documents.service import clusters, profiles
from planner_service.documents.store import PackedDocument
from planner_service.platform.requests import (
    GENERAL_LIMIT,
    MEBIBYTE,
    Services,
    mark_created,
    page_response,
    sent,
    takes,
)
from planner_service.platform.writers import WritingRoute

PROFILE = DocumentLane(noun="profiles", path="/v1/profiles/{profile_id}", scopes=("read",), load=profiles.document)
CLUSTER = DocumentLane(noun="clusters", path="/v1/clusters/{cluster_id}", scopes=("read",), load=clusters.document)

profile_router = APIRouter(prefix="/v1/profiles", tags=["profiles"], route_class=WritingRoute)
cluster_router = APIRouter(prefix="/v1/clusters", tags=["clusters"], route_class=WritingRoute)


@profile_router.post(
    "",
    dependencies=[scope("plan"), takes(GENERAL_LIMIT)],
    status_code=201,
    responses={200: {"model": ProfileSummary, "description": "It was stored before"}},
)
def create_profile(
    services: Services, profile: Annotated[PackedDocument, Depends(sent(profiles.read))], response: Response
) -> ProfileSummary:
    """Stores a profile. The same content has the same id and is stored once."""
    summary, new = profiles.keep(services, profile)
    mark_created(response, new, f"/v1/profiles/{summary.id}")
    return summary


@profile_router.get("", dependencies=[scope("read")], response_model=Page[ProfileSummary])
def list_profiles(services: Services, query: Annotated[ProfileQuery, Query()]) -> Response:
    """The profiles: newest first, or in the requested order; those that pass all filters."""
    return page_response(profiles.page(services, query))


@profile_router.get("/{profile_id}", dependencies=[scope(*PROFILE.scopes)], response_model=Profile, responses=UNCHANGED)
def get_profile(services: Services, request: Request, profile_id: str) -> Response:
    """A profile's document. It never changes: its id is its entity tag."""
    content = stored(services, PROFILE.noun, profile_id, profiles.document)
    return document_response(request, profile_id, lambda: content)


@profile_router.get(
    "/{profile_id}/charts/{chart}.{kind}", dependencies=[scope("read")], response_class=Response, responses=ANSWERS
)
def get_profile_chart(
    services: Services,
    request: Request,
    profile_id: str,
    chart: ProfileChart,
    kind: Format,
    microbatch_size: Annotated[str, Query(description="one that was measured; default: the largest")] = "",
) -> Response:
    """A chart of a profile's page, as a table or as a picture."""
    content = profiles.document(services, profile_id)

    def make() -> str:
        read = partial(profile_file, chart, kind, microbatch_size)
        return services.parsing.read_stored(read, content, len(content))

    name = f"profile-{profile_id[:8]}-{chart}"
    return chart_response(request, profile_id, kind, name, make, microbatch_size)


@cluster_router.post(
    "",
    dependencies=[scope("plan"), takes(MEBIBYTE)],
    status_code=201,
    responses={200: {"model": ClusterSummary, "description": "It was stored before"}},
)
def create_cluster(
    services: Services, cluster: Annotated[PackedDocument, Depends(sent(clusters.read))], response: Response
) -> ClusterSummary:
    """Stores a cluster. The same content has the same id and is stored once."""
    summary, new = clusters.keep(services, cluster)
    mark_created(response, new, f"/v1/clusters/{summary.id}")
    return summary


@cluster_router.get("", dependencies=[scope("read")], response_model=Page[ClusterSummary])
def list_clusters(services: Services, query: Annotated[ClusterQuery, Query()]) -> Response:
    """The clusters: newest first, or in the requested order; those that pass all filters."""
    return page_response(clusters.page(services, query))


@cluster_router.get("/{cluster_id}", dependencies=[scope(*CLUSTER.scopes)], response_model=Cluster, responses=UNCHANGED)
def get_cluster(services: Services, request: Request, cluster_id: str) -> Response:
    """A cluster's document. It never changes: its id is its entity tag."""
    content = stored(services, CLUSTER.noun, cluster_id, clusters.document)
    return document_response(request, cluster_id, lambda: content)


@cluster_router.get(
    "/{cluster_id}/charts/levels.{kind}", dependencies=[scope("read")], response_class=Response, responses=ANSWERS
)
def get_cluster_chart(services: Services, request: Request, cluster_id: str, kind: Format) -> Response:
    """The levels of a cluster's network, as a table or as a picture."""
    content = clusters.document(services, cluster_id)
    return chart_response(
        request, cluster_id, kind, f"cluster-{cluster_id[:8]}-levels", lambda: cluster_file(kind, content)
    )
