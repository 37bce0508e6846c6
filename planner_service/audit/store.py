"""Store of the audit log: reads its entries for lists. `platform/trail` appends them."""

from typing import Any

from sqlalchemy import Connection, Row, select

from pipeplan.protocol.audit import AuditEntry, AuditQuery
from pipeplan.protocol.listing import Page
from planner_service.platform import listing
from planner_service.platform.listing import Listing, equal
from planner_service.platform.stored import columns_of
from planner_service.platform.tables import audit


def page(connection: Connection, query: AuditQuery) -> Page[AuditEntry]:
    """The entries that the query asks for."""
    named = {name: audit.c[name] for name in ("object_id", "token_id", "agent", "actor", "action", "outcome")}
    filters = [equal(name, column, getattr(query, name)) for name, column in named.items()]
    return listing.page(
        connection, _LISTING, listing.cut_of(query), [*filters, *listing.created(audit.c.created_at, query)]
    )


def _entry(row: Row[Any]) -> AuditEntry:
    return AuditEntry.model_construct(**columns_of(row, AuditEntry))


_LISTING = Listing(table=audit, query=select(audit), item=_entry, sorts={"created_at": audit.c.created_at})
