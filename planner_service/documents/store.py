"""Profiles and clusters, each stored once under its content's id."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from sqlalchemy import Column, Connection, Row, Table, bindparam, insert, select

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.identity import canonical_json, text_id
from pipeplan.documents.profile import Profile
from pipeplan.protocol.documents import ClusterQuery, ClusterSummary, ProfileQuery, ProfileSummary
from pipeplan.protocol.listing import ListQuery, Page
from planner_service.platform import listing, tables
from planner_service.platform.listing import Listing, equal, has_name, insert_once
from planner_service.platform.stored import note_use


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProfile:
    """A profile in the form in which it is stored: its document, and what lists show of it."""

    id: str
    content: str
    model_name: str
    device_name: str
    dtype: str
    blocks: int
    estimated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCluster:
    """A cluster in the form in which it is stored: its document, and what lists show of it."""

    id: str
    content: str
    device_name: str
    device_types: str
    devices: int


Packed = TypeVar("Packed", bound=PackedProfile | PackedCluster)
Summary = TypeVar("Summary", bound=ProfileSummary | ClusterSummary)
Query = TypeVar("Query", bound=ListQuery)


class DocumentTable(Generic[Packed, Summary, Query]):
    """The rows of one kind of document, which are added and never changed.

    `filters` has the column of each field of the query, `named` that of each field which is one of a column's names,
    `sorts` the columns by which lists may be sorted.
    """

    def __init__(
        self,
        table: Table,
        summary: Callable[[Row[Any]], Summary],
        *,
        filters: Mapping[str, Column[Any]],
        sorts: Mapping[str, Column[Any]],
        named: Mapping[str, Column[Any]] | None = None,
    ) -> None:
        self._table = table
        self._summary = summary
        self._filters = filters
        self._named = named or {}
        # Made once: building a statement takes longer than executing it.
        self._content = select(table.c.content).where(table.c.id == bindparam("asked_id"))
        self._summaries = select(*(column for column in table.c if column.name != "content"))
        self._listing = Listing(table=table, query=self._summaries, item=summary, sorts=sorts)

    def add(self, connection: Connection, document: Packed, now: datetime) -> bool:
        """Stores the document unless it is there; returns whether it is new."""
        if self.summary(connection, document.id) is not None:
            note_use(connection, self._table, document.id, now)
            return False
        return insert_once(connection, insert(self._table).values(**asdict(document), created_at=now))

    def content(self, connection: Connection, document_id: str) -> str | None:
        return connection.execute(self._content, {"asked_id": document_id}).scalar_one_or_none()

    def contents(self, connection: Connection, document_ids: Sequence[str]) -> dict[str, str]:
        """The texts of these documents, by their ids."""
        query = select(self._table.c.id, self._table.c.content).where(self._table.c.id.in_(document_ids))
        return {row.id: row.content for row in connection.execute(query)}

    def summary(self, connection: Connection, document_id: str) -> Summary | None:
        """The document as lists show it."""
        row = connection.execute(self._summaries.where(self._table.c.id == document_id)).one_or_none()
        return None if row is None else self._summary(row)

    def page(self, connection: Connection, query: Query) -> Page[Summary]:
        """The documents that the query asks for."""
        filters = [equal(name, column, getattr(query, name)) for name, column in self._filters.items()]
        filters += [has_name(name, column, getattr(query, name)) for name, column in self._named.items()]
        filters += listing.created(self._table.c.created_at, query)
        return listing.page(connection, self._listing, listing.cut_of(query), filters)


def packed_profile(profile: Profile) -> PackedProfile:
    """Packs a profile. A large one takes a second: call it outside transactions and off the event loop."""
    content = canonical_json(profile)
    return PackedProfile(
        id=text_id(content),
        content=content,
        model_name=profile.model.name,
        device_name=profile.device.name,
        dtype=profile.dtype,
        blocks=len(profile.blocks),
        estimated=profile.estimated,
    )


def packed_cluster(cluster: Cluster) -> PackedCluster:
    """Packs a cluster."""
    content = canonical_json(cluster)
    return PackedCluster(
        id=text_id(content),
        content=content,
        device_name=cluster.device.name,
        device_types=listing.pairs_json(cluster.counts),
        devices=cluster.devices,
    )


def device_types_text(pairs: str) -> str:
    """The types that the column holds, as lists show them: `8 x A100 + 16 x V100`; `unreadable` for another form."""
    try:
        return " + ".join(f"{number} x {name}" for name, number in json.loads(pairs))
    except (ValueError, TypeError):  # another release's
        return "unreadable"


def _profile_summary(row: Row[Any]) -> ProfileSummary:
    return ProfileSummary(
        id=row.id,
        model=row.model_name,
        device=row.device_name,
        dtype=row.dtype,
        blocks=row.blocks,
        created_at=row.created_at,
        estimated=row.estimated,
    )


def _cluster_summary(row: Row[Any]) -> ClusterSummary:
    return ClusterSummary(
        id=row.id,
        device=row.device_name,
        devices=row.devices,
        created_at=row.created_at,
        device_types=device_types_text(row.device_types),
    )


_PROFILE, _CLUSTER = tables.profiles.c, tables.clusters.c

profiles: DocumentTable[PackedProfile, ProfileSummary, ProfileQuery] = DocumentTable(
    tables.profiles,
    _profile_summary,
    filters={
        "model": _PROFILE.model_name,
        "device": _PROFILE.device_name,
        "dtype": _PROFILE.dtype,
        "estimated": _PROFILE.estimated,
    },
    sorts={"created_at": _PROFILE.created_at, "blocks": _PROFILE.blocks},
)

clusters: DocumentTable[PackedCluster, ClusterSummary, ClusterQuery] = DocumentTable(
    tables.clusters,
    _cluster_summary,
    filters={"devices": _CLUSTER.devices},
    named={"device": _CLUSTER.device_types},
    sorts={"created_at": _CLUSTER.created_at, "devices": _CLUSTER.devices},
)
