"""Clusters, by their content."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.identity import canonical_json, text_id
from planner_service.contract.clusters import ClusterQuery, ClusterSummary
from planner_service.contract.listing import Page
from planner_service.storage import listing
from planner_service.storage.listing import Listing, equal, insert_once
from planner_service.storage.tables import clusters

_SUMMARY = [column for column in clusters.c if column.name != "content"]

_CONTENT = select(clusters.c.content).where(clusters.c.id == bindparam("asked_id"))
"""Made once: to build a statement takes longer than to execute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCluster:
    """A cluster in the form in which it is stored: its document, and what lists show of it."""

    id: str
    content: str
    device_name: str
    devices: int


def packed(cluster: Cluster) -> PackedCluster:
    """Packs a cluster."""
    content = canonical_json(cluster)
    return PackedCluster(id=text_id(content), content=content, device_name=cluster.device.name, devices=cluster.devices)


def add(connection: Connection, cluster: PackedCluster, now: datetime) -> bool:
    """Stores the cluster unless it is there; says whether it is new."""
    if summary(connection, cluster.id) is not None:
        return False
    return insert_once(connection, insert(clusters).values(**asdict(cluster), created_at=now))


def content(connection: Connection, cluster_id: str) -> str | None:
    """The cluster's document."""
    return connection.execute(_CONTENT, {"asked_id": cluster_id}).scalar_one_or_none()


def summary(connection: Connection, cluster_id: str) -> ClusterSummary | None:
    """The cluster as lists show it."""
    row = connection.execute(select(*_SUMMARY).where(clusters.c.id == cluster_id)).one_or_none()
    return None if row is None else _summary(row)


def page(connection: Connection, query: ClusterQuery) -> Page[ClusterSummary]:
    """The clusters that the query asks for."""
    filters = [
        equal("device", clusters.c.device_name, query.device),
        equal("devices", clusters.c.devices, query.devices),
        *listing.created(clusters.c.created_at, query),
    ]
    return listing.page(connection, _LISTING, listing.cut_of(query), filters)


def _summary(row: Row[Any]) -> ClusterSummary:
    return ClusterSummary(id=row.id, device=row.device_name, devices=row.devices, created_at=row.created_at)


_LISTING = Listing(
    table=clusters,
    query=select(*_SUMMARY),
    item=_summary,
    sorts={"created_at": clusters.c.created_at, "devices": clusters.c.devices},
)
