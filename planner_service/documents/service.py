"""Profiles and clusters: they are stored under their content's id, and never change."""

from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse_sent
from pipeplan.documents.profile import Profile
from pipeplan.protocol.audit import Action
from pipeplan.protocol.documents import ClusterQuery, ClusterSummary, ProfileQuery, ProfileSummary
from pipeplan.protocol.listing import Page
from planner_service.documents import store
from planner_service.documents.store import DocumentTable, PackedDocument, Query, Summary
from planner_service.platform import trail
from planner_service.platform.context import Context, found
from planner_service.platform.listing import Cut

Document = TypeVar("Document", bound=Profile | Cluster)


class StoredDocuments(Generic[Document, Summary, Query]):
    """One kind of document. `noun` names it in errors; `pack` prepares it for storage."""

    def __init__(
        self,
        noun: Literal["profile", "cluster"],
        kind: type[Document],
        pack: Callable[[Document], PackedDocument],
        table: DocumentTable[Summary, Query],
        query: type[Query],
    ) -> None:
        self._noun = noun
        self._stores: Action = "profile.store" if noun == "profile" else "cluster.store"
        self._kind = kind
        self._pack = pack
        self._table = table
        self._query = query

    def read(self, content: bytes) -> PackedDocument:
        """The document of a body, prepared for storage. Raises InvalidInputError."""
        return self._pack(parse_sent(self._kind, content))

    def create(self, context: Context, document: Document) -> tuple[Summary, bool]:
        return self.keep(context, self._pack(document))

    def keep(self, context: Context, document: PackedDocument) -> tuple[Summary, bool]:
        """Stores a packed document, and returns whether it is new."""
        with context.database.write() as connection:
            new = self._table.add(connection, document, context.now())
            trail.record(connection, self._stores, document.id, context.now())
            return found(self._noun, document.id, self._table.summary(connection, document.id)), new

    def document(self, context: Context, document_id: str) -> str:
        """The document's JSON text. Raises NotFoundError."""
        with context.database.read() as connection:
            return found(self._noun, document_id, self._table.content(connection, document_id))

    def documents(self, context: Context, document_ids: Sequence[str]) -> dict[str, str]:
        """The JSON texts of these documents, by their ids."""
        with context.database.read() as connection:
            return self._table.contents(connection, document_ids)

    def page(self, context: Context, query: Query) -> Page[Summary]:
        """The documents that the query asks for."""
        with context.database.read() as connection:
            return self._table.page(connection, query)

    def newest(self, context: Context, cut: Cut) -> Page[Summary]:
        """A page of documents, newest first."""
        return self.page(context, self._query(limit=cut.limit, cursor=cut.cursor))


profiles: StoredDocuments[Profile, ProfileSummary, ProfileQuery] = StoredDocuments(
    "profile", Profile, store.packed_profile, store.profiles, ProfileQuery
)
clusters: StoredDocuments[Cluster, ClusterSummary, ClusterQuery] = StoredDocuments(
    "cluster", Cluster, store.packed_cluster, store.clusters, ClusterQuery
)
