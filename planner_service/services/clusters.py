"""Clusters: stored by content, never changed."""

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse_sent
from planner_service.contract.clusters import ClusterQuery, ClusterSummary
from planner_service.contract.listing import Page
from planner_service.services.context import Context, found
from planner_service.storage import clusters as storage
from planner_service.storage.clusters import PackedCluster
from planner_service.storage.listing import Cut


def read(content: bytes) -> PackedCluster:
    """The cluster that a body holds, as it is stored. Raises InvalidInputError."""
    return storage.packed(parse_sent(Cluster, content))


def create(context: Context, cluster: Cluster) -> tuple[ClusterSummary, bool]:
    """Stores a cluster, and says whether it is new."""
    return keep(context, storage.packed(cluster))


def keep(context: Context, cluster: PackedCluster) -> tuple[ClusterSummary, bool]:
    """The same of one that is packed."""
    with context.database.write() as connection:
        new = storage.add(connection, cluster, context.now())
        return found("cluster", cluster.id, storage.summary(connection, cluster.id)), new


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
