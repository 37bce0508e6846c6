"""Aliases: the rows of where each points, and of every move that it made."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from pipeplan.protocol.listing import ListQuery, Page
from pipeplan.protocol.plans import Alias, AliasMove, AliasQuery
from planner_service.platform import listing
from planner_service.platform.listing import Listing, equal, insert_once
from planner_service.platform.stored import columns_of
from planner_service.platform.tables import alias_moves, aliases, plans


def get(connection: Connection, name: str, *, lock: bool = False) -> Alias | None:
    """The alias's target. With `lock` its row stays locked until the transaction ends."""
    query = select(aliases).where(aliases.c.name == name)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return None if row is None else _alias(row)


def hold_plan(connection: Connection, plan_id: str) -> bool:
    """Whether the plan is stored; it stays so until the transaction ends."""
    query = select(plans.c.id).where(plans.c.id == plan_id).with_for_update(read=True, key_share=True)
    return connection.execute(query).one_or_none() is not None


def add(connection: Connection, name: str, plan_id: str, by: str, now: datetime) -> bool:
    """Adds a name; False where another transaction has just added it."""
    row = insert(aliases).values(name=name, plan_id=plan_id, version=0, moved_by=by, created_at=now, moved_at=now)
    return insert_once(connection, row)


def move(connection: Connection, name: str, plan_id: str, by: str, now: datetime) -> None:
    """Points the name at the plan, and records the move."""
    version = _record(connection, name, plan_id, by, now)
    values = {"plan_id": plan_id, "version": version, "moved_by": by, "moved_at": now}
    connection.execute(update(aliases).where(aliases.c.name == name).values(**values))


def remove(connection: Connection, name: str, by: str, now: datetime) -> None:
    """Deletes the name, and records that. Its history stays."""
    connection.execute(delete(aliases).where(aliases.c.name == name))
    _record(connection, name, None, by, now)


def page(connection: Connection, query: AliasQuery) -> Page[Alias]:
    """The aliases that the query asks for."""
    filters = [equal("plan_id", aliases.c.plan_id, query.plan_id), *listing.created(aliases.c.created_at, query)]
    return listing.page(connection, _ALIASES, listing.cut_of(query), filters)


def history(connection: Connection, name: str, query: ListQuery) -> Page[AliasMove]:
    """The alias's targets, the latest first."""
    filters = [equal("name", alias_moves.c.name, name), *listing.created(alias_moves.c.moved_at, query)]
    return listing.page(connection, _MOVES, listing.cut_of(query), filters)


def _record(connection: Connection, name: str, plan_id: str | None, by: str, now: datetime) -> int:
    """Adds a move to the history; its number is the alias's version."""
    row = insert(alias_moves).values(name=name, plan_id=plan_id, moved_by=by, moved_at=now)
    return int(connection.execute(row.returning(alias_moves.c.sequence)).scalar_one())


def _alias(row: Row[Any]) -> Alias:
    return Alias(**columns_of(row, Alias))


def _move(row: Row[Any]) -> AliasMove:
    return AliasMove(version=row.sequence, **columns_of(row, AliasMove))


_ALIASES = Listing(
    table=aliases, query=select(aliases), item=_alias, sorts={"created_at": aliases.c.sequence, "name": aliases.c.name}
)
_MOVES = Listing(table=alias_moves, query=select(alias_moves), item=_move, sorts={"created_at": alias_moves.c.sequence})
