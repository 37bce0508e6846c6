"""Store of the plans, by their content. A plan never changes, except that a play may be added once. Its request and its
solve time are stored with it.
"""

from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, Connection, Row, bindparam, insert, or_, select, type_coerce, update
from sqlalchemy.types import NullType

from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.files import plan_document
from pipeplan.documents.identity import canonical_json, content_id
from pipeplan.documents.plan import Plan
from pipeplan.errors import ConflictError
from pipeplan.protocol.listing import Page
from pipeplan.protocol.plans import PlanQuery, PlanRequest, PlanSummary
from planner_service.documents.store import device_types_text
from planner_service.plans.questions import Price
from planner_service.platform import listing
from planner_service.platform.listing import Filter, Listing, at_least, equal, has_name, insert_once
from planner_service.platform.stored import columns_of, note_use, read_stored
from planner_service.platform.tables import clusters, plans

_COLUMNS = {"model": plans.c.model_name, "device": plans.c.device_name}
_SUMMARY = [(_COLUMNS[name] if name in _COLUMNS else plans.c[name]).label(name) for name in PlanSummary.model_fields]
"""The columns of lists, by the names and in the order of a summary's fields."""

_COPIED = (
    *("planner", "planner_version", "estimated", "schedule", "depth", "width", "workers", "batch_size"),
    *("microbatch_size", "microbatches", "throughput_samples_per_s", "bubble_fraction"),
)
"""The columns that are a plan's attributes."""

_REQUEST = TypeAdapter(PlanRequest)
_CONTENT = select(plans.c.content).where(plans.c.id == bindparam("asked_id"))
"""The statement is made once: building it takes longer than executing it."""


def add(
    connection: Connection,
    plan: Plan,
    request: PlanRequest,
    solve_time_s: float,
    now: datetime,
    asked_by: str | None = None,
) -> bool:
    """Stores the plan unless it is there, in which case the first request is kept; returns whether it is new."""
    plan_id = content_id(plan)
    if summary(connection, plan_id) is not None:
        note_use(connection, plans, plan_id, now)
        return False
    columns = clusters.c.device_name, clusters.c.device_types, clusters.c.devices
    query = select(*columns).where(clusters.c.id == request.cluster_id)
    cluster = connection.execute(query).one_or_none()
    if cluster is None:
        raise ConflictError(f"cluster {request.cluster_id} was removed while the plan was made")
    row = insert(plans).values(
        id=plan_id,
        content=canonical_json(plan_document(plan)),
        request=request.model_dump_json(),
        solve_time_s=solve_time_s,
        model_name=plan.model.name,
        profile_id=request.profile_id,
        cluster_id=request.cluster_id,
        closed_form_samples_per_s=plan.closed_form.throughput_samples_per_s,
        closed_form_bubble_fraction=plan.closed_form.bubble_fraction,
        created_at=now,
        memory_bytes=max(rank_bytes(plan)),
        asked_by=asked_by,
        **{name: getattr(plan, name) for name in _COPIED},
        **cluster._mapping,
    )
    return insert_once(connection, row)


def content(connection: Connection, plan_id: str) -> str | None:
    return connection.execute(_CONTENT, {"asked_id": plan_id}).scalar_one_or_none()


def request(connection: Connection, plan_id: str) -> PlanRequest | None:
    """The request with which the plan was first stored."""
    text = connection.execute(select(plans.c.request).where(plans.c.id == plan_id)).scalar_one_or_none()
    return None if text is None else read_stored(_REQUEST, text)


def summary(connection: Connection, plan_id: str) -> PlanSummary | None:
    """The plan as lists show it."""
    row = connection.execute(select(*_SUMMARY).where(plans.c.id == plan_id)).one_or_none()
    return None if row is None else _summary(row)


def page(connection: Connection, query: PlanQuery) -> Page[PlanSummary]:
    return listing.page(connection, _SUMMARIES, listing.cut_of(query), _filters(query))


def summaries(connection: Connection, plan_ids: Sequence[str]) -> list[PlanSummary]:
    return [_summary(row) for row in connection.execute(_SUMMARIES_OF, {"asked_ids": plan_ids})]


def page_of_keys(connection: Connection, query: PlanQuery) -> Page[str]:
    """The ids of the plans that the query asks for, each with when it was stored.

    A plan that was removed and stored again has its id, and another moment.
    """
    return listing.page(connection, _KEYS, listing.cut_of(query), _filters(query))


def page_of_ids(connection: Connection, query: PlanQuery) -> Page[str]:
    return listing.page(connection, _IDS, listing.cut_of(query), _filters(query))


def contents(connection: Connection, plan_ids: Sequence[str]) -> dict[str, str]:
    """The documents of those plans that are stored, by id."""
    rows = connection.execute(select(plans.c.id, plans.c.content).where(plans.c.id.in_(plan_ids)))
    return {row.id: row.content for row in rows}


def without_price(connection: Connection, instructions: int, now: datetime) -> str | None:
    """The newest plan that was not played, nor tried with `instructions`, and has no claim now."""
    query = select(plans.c.id).where(*_to_be_played(instructions, now)).order_by(plans.c.sequence.desc()).limit(1)
    return connection.execute(query).scalar_one_or_none()


def claim(connection: Connection, plan_id: str, instructions: int, now: datetime, until: datetime) -> str | None:
    """Keeps others from playing such a plan until then. Returns its document, or None if another process was first."""
    claimed = update(plans).where(plans.c.id == plan_id, *_to_be_played(instructions, now)).values(claimed_until=until)
    return content(connection, plan_id) if connection.execute(claimed).rowcount else None


def add_price(connection: Connection, plan_id: str, price: Price) -> bool:
    """Adds a play to a plan that has none; returns whether it had none."""
    values = {
        "content": price.content,
        "throughput_samples_per_s": price.throughput_samples_per_s,
        "bubble_fraction": price.bubble_fraction,
        "claimed_until": None,
    }
    added = update(plans).where(plans.c.id == plan_id, plans.c.throughput_samples_per_s.is_(None)).values(values)
    return connection.execute(added).rowcount > 0


def end_claim(connection: Connection, plan_id: str, until: datetime, tried_instructions: int | None) -> None:
    """Ends this claim. `tried`: the limit of instructions at which the play failed, None if it was not tried."""
    ended = update(plans).where(plans.c.id == plan_id, plans.c.claimed_until == until).values(claimed_until=None)
    connection.execute(ended if tried_instructions is None else ended.values(tried_instructions=tried_instructions))


def _to_be_played(instructions: int, now: datetime) -> tuple[ColumnElement[bool], ...]:
    tried, claimed = plans.c.tried_instructions, plans.c.claimed_until
    return (
        plans.c.throughput_samples_per_s.is_(None),
        or_(tried.is_(None), tried < instructions),
        or_(claimed.is_(None), claimed <= now),
    )


def _filters(query: PlanQuery) -> list[Filter]:
    """The filters; those that usually leave the fewest rows come first."""
    return [
        equal("profile_id", plans.c.profile_id, query.profile_id),
        equal("cluster_id", plans.c.cluster_id, query.cluster_id),
        equal("model", plans.c.model_name, query.model),
        equal("planner", plans.c.planner, query.planner),
        equal("schedule", plans.c.schedule, query.schedule),
        has_name("device", plans.c.device_types, query.device),
        equal("devices", plans.c.devices, query.devices),
        equal("estimated", plans.c.estimated, query.estimated),
        at_least("min_throughput", plans.c.throughput_samples_per_s, query.min_throughput),
        *listing.created(plans.c.created_at, query),
    ]


def _summary(row: Row[Any]) -> PlanSummary:
    types = device_types_text(row.device_types)
    return PlanSummary.model_validate(columns_of(row, PlanSummary) | {"device_types": types})


def _key(row: Row[Any]) -> str:
    return f"{row.id} {row.stored}"


_SORTS = {
    "created_at": plans.c.created_at,
    "throughput": plans.c.throughput_samples_per_s,
    "memory": plans.c.memory_bytes,
}
_SUMMARIES = Listing(table=plans, query=select(*_SUMMARY), item=_summary, sorts=_SORTS)
_SUMMARIES_OF = select(*_SUMMARY).where(plans.c.id.in_(bindparam("asked_ids", expanding=True)))
_STORED = type_coerce(plans.c.created_at, NullType()).label("stored")  # as the driver has it, which is faster
_KEYS = Listing(table=plans, query=select(plans.c.id, _STORED), item=_key, sorts=_SORTS)
_IDS = Listing(table=plans, query=select(plans.c.id), item=attrgetter("id"), sorts=_SORTS)
