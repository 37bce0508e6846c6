"""Listings: pages of a table's rows, filtered and sorted, by keyset; and rows that are stored once.

The cost of a page does not grow with the table. A page starts where the previous one ended, which an index finds.
Filters without an index apply to at most MAX_SCANNED rows: a page that finds too few among them is short, and its
cursor points after the last scanned row.

    rows in order   | . . . | x . x . . x . x . x | . . . |
                     cursor   scan, at most MAX_SCANNED

Rows with null in the column of the order come last in both directions. Databases sort such rows differently, and none
finds them at the end of a descending order by the index of an ascending one. So a page takes rows with a value first,
and then those without, by their sequence: an index finds both.
"""

import base64
import binascii
import hashlib
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    FromClause,
    Insert,
    Integer,
    Row,
    Select,
    Table,
    bindparam,
    func,
    select,
    tuple_,
)
from sqlalchemy.exc import IntegrityError

from pipeplan.errors import InvalidInputError, require
from pipeplan.protocol.listing import ListQuery, Page
from planner_service.platform.database import is_duplicate
from planner_service.platform.tables import UtcTime

T = TypeVar("T")

MAX_SEQUENCE = 2**63 - 1
MAX_SCANNED = 5_000
"""The upper bound on rows that a page scans for a filter without an index."""

NEWEST = "-created_at"

Comparison = Literal["equal", "at_least", "below", "one_of", "holds"]
_Shape = tuple[str, Column[Any], Comparison]
"""A filter without its value: its name, column and comparison."""

_CURSOR_RULE = "must be the next_cursor of this list, asked for with the same filters and sort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which page of a listing: at most `limit` items, those that follow the cursor.

    `sort` names the column of the order, with a minus before it for a descending one. None: the cursor's order, or the
    newest first without a cursor.
    """

    limit: int = 50
    cursor: str | None = None
    sort: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """The condition of `column` for a row to pass.

    None, or no values, passes all rows. `name` is the request's field.
    """

    name: str
    column: Column[Any]
    value: Any
    compare: Comparison = "equal"


equal, at_least, below = Filter, partial(Filter, compare="at_least"), partial(Filter, compare="below")
"""The column holds the value; the value or more; less than the value."""


def one_of(name: str, column: Column[Any], values: Sequence[object]) -> Filter:
    return Filter(name, column, tuple(values), "one_of")


def pairs_json(numbers: Mapping[str, int]) -> str:
    """The text of a column that holds names with their numbers: `[["A100",8],["V100",16]]`."""
    return json.dumps(list(numbers.items()), ensure_ascii=False, separators=(",", ":"))


def has_name(name: str, column: Column[Any], value: str | None) -> Filter:
    """The column, which holds pairs, has one of this name.

    Inside a name a quotation mark has a backslash, so only a pair begins with this text.
    """
    start = None if value is None else f"[{json.dumps(value, ensure_ascii=False)},"
    return Filter(name, column, start, "holds")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listing(Generic[T]):
    """The definition of a list: the query of its rows, the function that makes an item of a row, and the columns of its
    sorts.

    `table` has the `sequence` that orders equal rows. `rows` has the columns of filters and sorts: a join where
    they belong to several tables, None for the table alone. A sort needs an index on its column and the sequence
    (`created_at` may be the sequence itself). An index with a filter's column before these two answers that filter
    too, however few rows pass it. Rows with null in a sort's column come last in both directions.
    """

    table: Table
    query: Select[Any]
    item: Callable[[Row[Any]], T]
    sorts: Mapping[str, Column[Any]]
    rows: FromClause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A sort of a listing: by its column, then by the sequence.

    For a column that may be null, `empty` selects the part of the rows: those with null, or the others.
    """

    name: str
    column: Column[Any]
    sequence: Column[Any]
    descending: bool
    empty: bool = False

    @property
    def keys(self) -> tuple[Column[Any], ...]:
        return (self.column,) if self.column is self.sequence else (self.column, self.sequence)

    def by(self) -> list[ColumnElement[Any]]:
        return [key.desc() if self.descending else key.asc() for key in self.keys]

    def part(self) -> list[ColumnElement[bool]]:
        """The rows of this part; a column that is never null has only one part."""
        if not self.column.nullable:
            return []
        return [self.column.is_(None) if self.empty else self.column.is_not(None)]

    def behind_start(self) -> ColumnElement[bool]:
        """The rows that come after `start_value` and `start_sequence`; of the empty ones, after the sequence."""
        compare = operator.lt if self.descending else operator.gt
        if self.empty:
            after: ColumnElement[bool] = compare(self.sequence, bindparam("start_sequence", type_=self.sequence.type))
            return after
        named = {self.column: "start_value", self.sequence: "start_sequence"}
        starts = [bindparam(named[key], type_=key.type) for key in self.keys]
        condition: ColumnElement[bool] = (
            compare(self.keys[0], starts[0]) if len(starts) == 1 else compare(tuple_(*self.keys), tuple_(*starts))
        )
        return condition


def cut_of(query: ListQuery) -> Cut:
    return Cut(limit=query.limit, cursor=query.cursor, sort=getattr(query, "sort", None))


def created(column: Column[Any], query: ListQuery) -> list[Filter]:
    """The filters of a query by the time of a row."""
    after = at_least("created_after", column, query.created_after)
    return [after, below("created_before", column, query.created_before)]


def page(connection: Connection, listing: Listing[T], cut: Cut, filters: Sequence[Filter] = ()) -> Page[T]:
    """The page of the rows that pass all filters. Raises InvalidInputError for a sort or a cursor of another list."""
    given = [one for one in filters if one.value not in (None, ())]
    order, start = _start(listing, cut, given)
    shapes = tuple((one.name, one.column, one.compare) for one in given)
    values = {f"filter_{one.name}": one.value for one in given}
    values |= {"scan_limit": MAX_SCANNED, "scan_end": MAX_SCANNED - 1}
    if start is not None:
        values |= {"start_value": start[0], "start_sequence": start[1]}

    rows: list[Row[Any]] = []
    last: Row[Any] | None = None
    for empty in (False, True) if order.column.nullable else (False,):
        if empty < order.empty:
            continue  # the page before has ended among the empty ones
        items, end = _statements(listing, order.name, shapes, start is not None and empty == order.empty, empty)
        # One more row than the page has shows whether another page follows.
        values["page_limit"] = cut.limit + 1 - len(rows)
        rows += connection.execute(items, values).all()
        if len(rows) > cut.limit:
            last = rows[cut.limit - 1]
        elif end is not None:
            last = connection.execute(end, values).one_or_none()
        if last is not None:
            break

    cursor = None
    if last is not None:  # `_start` reads this cursor
        key = last.page_key.isoformat() if isinstance(last.page_key, datetime) else last.page_key
        content = json.dumps([order.name, key, last.page_sequence, _fingerprint(given)], separators=(",", ":"))
        cursor = base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")
    return Page(items=tuple(listing.item(row) for row in rows[: cut.limit]), next_cursor=cursor)


def newest(
    connection: Connection, query: Select[Any], table: Table, cut: Cut, item: Callable[[Row[Any]], T]
) -> Page[T]:
    """The page of a query's rows, the newest first."""
    listing = Listing(table=table, query=query, item=item, sorts={"created_at": table.c.sequence})
    return page(connection, listing, cut)


def insert_once(connection: Connection, statement: Insert) -> bool:
    """Inserts a row unless one with its key exists; returns whether it did.

    The transaction continues in either case.
    """
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except IntegrityError as error:
        if is_duplicate(error):
            return False
        raise
    return True


@lru_cache(maxsize=1024)
def _statements(
    listing: Listing[Any], sort: str, shapes: tuple[_Shape, ...], following: bool, empty: bool
) -> tuple[Select[Any], Select[Any] | None]:
    """The statement of a page's items, and the one that finds the last row of the scan, if there is a scan.

    Both are made once for each kind of request: building a statement takes longer than executing it.
    """
    order = replace(_order(listing, sort), empty=empty)

    # An index in this order answers `near`; `far` are the filters for which rows are scanned.
    indexed = {tuple(index.columns) for index in listing.table.indexes}
    leading = [s for s in shapes if s[2] == "equal" and (s[1], *order.keys) in indexed][:1]
    near = [s for s in shapes if s[1] is order.column or s in leading]
    far = [s for s in shapes if s not in near]

    conditions = [_condition(shape) for shape in near] + order.part() + ([order.behind_start()] if following else [])
    keys = (order.column.label("page_key"), order.sequence.label("page_sequence"))
    items = listing.query.add_columns(*keys).order_by(*order.by()).limit(bindparam("page_limit", type_=Integer))
    if not far:
        return items.where(*conditions), None

    rows = listing.table if listing.rows is None else listing.rows

    def scan(*columns: ColumnElement[Any]) -> Select[Any]:
        return select(*columns).select_from(rows).where(*conditions).order_by(*order.by())

    columns = [column.label(f"filter_{name}") for name, column, _ in far]
    limited = scan(order.sequence.label("sequence"), *columns).limit(bindparam("scan_limit", type_=Integer))
    scanned = limited.subquery()
    passing = [_condition(shape, scanned.c[f"filter_{shape[0]}"]) for shape in far]
    chosen = select(scanned.c.sequence).where(*passing).limit(bindparam("page_limit", type_=Integer))
    end = scan(*keys).offset(bindparam("scan_end", type_=Integer)).limit(1)
    return items.where(order.sequence.in_(chosen)), end


def _condition(shape: _Shape, scanned: ColumnElement[Any] | None = None) -> ColumnElement[bool]:
    name, column, compare = shape
    tested = column if scanned is None else scanned
    value = bindparam(f"filter_{name}", type_=column.type, expanding=compare == "one_of")
    match compare:
        case "equal":
            return tested == value
        case "at_least":
            return tested >= value
        case "below":
            return tested < value
        case "one_of":
            return tested.in_(value)
        case "holds":  # not LIKE, which takes `a` for `A` on SQLite
            return func.replace(tested, value, "") != tested


def _start(listing: Listing[Any], cut: Cut, filters: Sequence[Filter]) -> tuple[_Order, tuple[Any, int] | None]:
    """The order, and the row after which the page starts, by its column's value and its sequence, from the
    cursor that `page` wrote.

    Callers can make cursors by hand: one of another list, or with a value that the column cannot have, is refused.
    """
    if cut.cursor is None:
        return _order(listing, cut.sort or NEWEST), None

    try:
        text = base64.b64decode(cut.cursor + "=" * (-len(cut.cursor) % 4), altchars=b"-_", validate=True)
        name, value, sequence, filtered = json.loads(text)
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError("cursor", _CURSOR_RULE, cut.cursor) from error
    whole = isinstance(sequence, int) and not isinstance(sequence, bool) and 0 <= sequence <= MAX_SEQUENCE
    require(whole and isinstance(name, str) and isinstance(filtered, str), "cursor", _CURSOR_RULE, cut.cursor)

    same = cut.sort in (None, name) and filtered == _fingerprint(filters)
    require(same and name.removeprefix("-") in listing.sorts, "cursor", _CURSOR_RULE, cut.cursor)
    order = _order(listing, name)
    if value is None and order.column.nullable:
        return replace(order, empty=True), (None, sequence)
    try:
        if isinstance(order.column.type, UtcTime):
            key: Any = datetime.fromisoformat(value)
            fits = key.tzinfo is not None and key.astimezone(UTC) is not None
        else:
            key = order.column.type.python_type(value)
            fits = "\0" not in key if isinstance(key, str) else math.isfinite(key) and abs(key) <= MAX_SEQUENCE
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError("cursor", _CURSOR_RULE, cut.cursor) from error
    require(fits, "cursor", _CURSOR_RULE, cut.cursor)
    return order, (key, sequence)


def _order(listing: Listing[Any], name: str) -> _Order:
    names = [sign + key for key in listing.sorts for sign in ("", "-")]
    require(name in names, "sort", f"must be one of {', '.join(names)}", name)
    return _Order(
        name=name,
        column=listing.sorts[name.removeprefix("-")],
        sequence=listing.table.c.sequence,
        descending=name.startswith("-"),
    )


def _fingerprint(filters: Sequence[Filter]) -> str:
    """Distinguishes a cursor of these filters from one of others; empty without filters."""
    told = sorted((one.name, str(one.value)) for one in filters)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12] if told else ""
