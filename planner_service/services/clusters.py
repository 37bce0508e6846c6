"""Clusters: stored by content, never changed."""

from planner_service.contract.clusters import ClusterQuery, ClusterSummary
from planner_service.contract.listing import Page
from planner_service.core.cluster import Cluster
from planner_service.services.context import Context, found
from planner_service.storage import clusters as storage
from planner_service.storage.listing import Cut


def create(context: Context, cluster: Cluster) -> tuple[ClusterSummary, bool]:
    """Stores a cluster, and says whether it is new."""
    with context.database.write() as connection:
        cluster_id, new = storage.add(connection, cluster, context.now())
        return found("cluster", cluster_id, storage.summary(connection, cluster_id)), new


def document(context: Context, cluster_id: str) -> str:
    """The cluster's JSON text. Raises NotFoundError."""
    with context.database.read() as connection:
        return found("cluster", cluster_id, storage.content(connection, cluster_id))


def page(context: Context, query: ClusterQuery) -> Page[ClusterSummary]:
    """The clusters that the query asks for."""
    with context.database.read() as connection:
        return storage.page(connection, query)


def newest(context: Context, cut: Cut) -> Page[ClusterSummary]:
    """A page of clusters, newest first."""
    return page(context, ClusterQuery(limit=cut.limit, cursor=cut.cursor))
