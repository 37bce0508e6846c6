"""Profiles and clusters, each stored once under its content's id."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from planner_service.platform.stored import columns_of, note_use


@dataclass(frozen=True, slots=True)
class PackedDocument:
    """A document in the form in which it is stored, and the columns that lists show of it."""

    id: str
    content: str
    columns: Mapping[str, object]


Summary = TypeVar("Summary", bound=ProfileSummary | ClusterSummary)
Query = TypeVar("Query", bound=ListQuery)


class DocumentTable(Generic[Summary, Query]):
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

    def add(self, connection: Connection, document: PackedDocument, now: datetime) -> bool:
        """Stores the document unless it is there; returns whether it is new."""
        if self.summary(connection, document.id) is not None:
            note_use(connection, self._table, document.id, now)
            return False
        row = insert(self._table).values(id=document.id, content=document.content, created_at=now, **document.columns)
        return insert_once(connection, row)

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


def packed_profile(profile: Profile) -> PackedDocument:
    """Packs a profile. A large one takes a second: call it outside transactions and off the event loop."""
    content = canonical_json(profile)
    names = {"model_name": profile.model.name, "device_name": profile.device.name, "dtype": profile.dtype}
    counted = {"blocks": len(profile.blocks), "estimated": profile.estimated}
    return PackedDocument(text_id(content), content, {**names, **counted})


def packed_cluster(cluster: Cluster) -> PackedDocument:
    """Packs a cluster."""
    content = canonical_json(cluster)
    types = {"device_name": cluster.device.name, "device_types": listing.pairs_json(cluster.counts)}
    return PackedDocument(text_id(content), content, {**types, "devices": cluster.devices})


def device_types_text(pairs: str) -> str:
    """The types that the column holds, as lists show them: `8 x A100 + 16 x V100`; `unreadable` for another form."""
    try:
        return " + ".join(f"{number} x {name}" for name, number in json.loads(pairs))
    except (ValueError, TypeError):  # another release's
        return "unreadable"


def _profile_summary(row: Row[Any]) -> ProfileSummary:
    return ProfileSummary(model=row.model_name, device=row.device_name, **columns_of(row, ProfileSummary))


def _cluster_summary(row: Row[Any]) -> ClusterSummary:
    types = {"device_types": device_types_text(row.device_types)}
    return ClusterSummary(device=row.device_name, **columns_of(row, ClusterSummary) | types)


_PROFILE, _CLUSTER = tables.profiles.c, tables.clusters.c

profiles: DocumentTable[ProfileSummary, ProfileQuery] = DocumentTable(
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

clusters: DocumentTable[ClusterSummary, ClusterQuery] = DocumentTable(
    tables.clusters,
    _cluster_summary,
    filters={"devices": _CLUSTER.devices},
    named={"device": _CLUSTER.device_types},
    sorts={"created_at": _CLUSTER.created_at, "devices": _CLUSTER.devices},
)
