"""Listings: newest rows first, a page at a time, and rows that are stored once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Insert, Row, Select, Table
from sqlalchemy.exc import IntegrityError

from planner_service.contract.listing import Page
from planner_service.core.errors import InvalidInputError

T = TypeVar("T")

MAX_SEQUENCE = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which page of a listing: at most `limit` items, those that follow the cursor."""

    limit: int = 50
    cursor: str | None = None


def newest(
    connection: Connection, query: Select[Any], table: Table, cut: Cut, item: Callable[[Row[Any]], T]
) -> Page[T]:
    """The page of a query's rows, by when they came into the table. The query must select the table's sequence."""
    selected = query.order_by(table.c.sequence.desc()).limit(cut.limit + 1)
    if cut.cursor is not None:
        selected = selected.where(table.c.sequence < _position(cut.cursor))
    rows: Sequence[Row[Any]] = connection.execute(selected).all()
    more = len(rows) > cut.limit
    return Page(
        items=tuple(item(row) for row in rows[: cut.limit]),
        next_cursor=str(rows[cut.limit - 1].sequence) if more else None,
    )


def insert_once(connection: Connection, statement: Insert) -> bool:
    """Inserts a row unless one with its key is there; says whether it did. The transaction goes on either way."""
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except IntegrityError:
        return False
    return True


def _position(cursor: str) -> int:
    if cursor.isascii() and cursor.isdigit() and int(cursor[:20]) <= MAX_SEQUENCE:
        return int(cursor)
    raise InvalidInputError("cursor", "must be the next_cursor of a listing", cursor)
