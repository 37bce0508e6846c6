"""Agents: a row each by name, with its registration and the time of its last request."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Connection, Row, bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite

from pipeplan.errors import ConflictError
from pipeplan.protocol.agents import AgentQuery, Registration
from pipeplan.protocol.listing import Page
from planner_service.platform import listing
from planner_service.platform.listing import Listing
from planner_service.platform.stored import columns_of, read_stored
from planner_service.platform.tables import agents

_REGISTRATION = TypeAdapter(Registration)

_BY_NAME = select(agents).where(agents.c.name == bindparam("asked_name"))
_CLAIM = _BY_NAME.with_for_update()
_BY_NAME_OR_ID = select(agents).where(
    (agents.c.name == bindparam("asked_name")) | (agents.c.id == bindparam("asked_name"))
)
_GIVEN = (
    update(agents)
    .where(agents.c.name.in_(bindparam("names", expanding=True)))
    .values(asked_at=None, job_id=bindparam("given_id"))
)
_SEEN = update(agents).where(agents.c.name == bindparam("agent_name")).values(last_seen_at=bindparam("moment"))
"""Made once, like the others: every report of an agent, and every request for work, executes some of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAgent:
    """An agent's registration, and the time of its last request. `asked_at` is None while it has a job.

    `unreadable` says why this release cannot read a registration with another release; `told` then has only its name
    and instance.
    """

    id: str
    told: Registration
    draining: bool
    job_id: str | None
    registered_at: datetime
    last_seen_at: datetime
    asked_at: datetime | None
    token_id: str | None
    unreadable: str | None = None

    @property
    def name(self) -> str:
        return self.told.name


def register(
    connection: Connection, agent_id: str, told: Registration, now: datetime, token_id: str | None = None
) -> None:
    """Stores the agent. It replaces one of its name, which was an earlier process on the node.

    The name belongs to the token from then on, if there is one.
    """
    values = {
        "instance": told.instance,
        "content": told.model_dump_json(),
        "draining": False,
        "job_id": None,
        "registered_at": now,
        "last_seen_at": now,
        "asked_at": None,
        "token_id": token_id,
    }
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    made = insert(agents).values(id=agent_id, name=told.name, **values)
    connection.execute(made.on_conflict_do_update(index_elements=["name"], set_=values))


def get(connection: Connection, name_or_id: str) -> KnownAgent | None:
    """The agent of this id, or else of this name."""
    rows = connection.execute(_BY_NAME_OR_ID, {"asked_name": name_or_id}).all()
    ranked = sorted(rows, key=lambda row: row.id != name_or_id)
    return _known(ranked[0]) if ranked else None


def named(connection: Connection, name: str) -> KnownAgent | None:
    """The agent of this name."""
    row = connection.execute(_BY_NAME, {"asked_name": name}).one_or_none()
    return None if row is None else _known(row)


def claim(connection: Connection, name: str) -> KnownAgent | None:
    """The agent of this name; on PostgreSQL its row stays locked until the transaction ends."""
    row = connection.execute(_CLAIM, {"asked_name": name}).one_or_none()
    return None if row is None else _known(row)


def page(connection: Connection, query: AgentQuery) -> Page[KnownAgent]:
    """The agents that the query asks for."""
    filters = listing.created(agents.c.registered_at, query)
    return listing.page(connection, _LISTING, listing.cut_of(query), filters)


def heard_since(connection: Connection, since: datetime) -> list[KnownAgent]:
    """The agents that were heard of since then, by name."""
    query = select(agents).where(agents.c.last_seen_at >= since).order_by(agents.c.name)
    return [_known(row) for row in connection.execute(query)]


def idle(connection: Connection, since: datetime, *, lock: bool = True) -> list[KnownAgent]:
    """The agents that have requested work since then and have none, by name, without those that others have locked.

    Transactions that choose agents skip each other's agents, so they never wait for each other. Without `lock` it only
    reads.
    """
    query = select(agents).where(agents.c.asked_at >= since, agents.c.draining.is_(False)).order_by(agents.c.name)
    return [_known(row) for row in connection.execute(query.with_for_update(skip_locked=True) if lock else query)]


def seen(connection: Connection, name: str, now: datetime, *, draining: bool | None = None) -> None:
    """Records that the agent was heard of."""
    if draining is None:
        connection.execute(_SEEN, {"agent_name": name, "moment": now})
    else:
        _set(connection, (name,), last_seen_at=now, draining=draining)


def asked(connection: Connection, name: str, now: datetime) -> None:
    """Records that the agent requested work and got none."""
    _set(connection, (name,), last_seen_at=now, asked_at=now, job_id=None)


def given(connection: Connection, names: Iterable[str], job_id: str) -> None:
    connection.execute(_GIVEN, {"names": list(names), "given_id": job_id})


def bring_back(connection: Connection, now: datetime) -> None:
    """Makes no sign of life lie in the future."""
    for column in (agents.c.last_seen_at, agents.c.asked_at):
        connection.execute(update(agents).where(column > now).values({column: now}))


def _set(connection: Connection, names: tuple[str, ...], **values: Any) -> None:
    connection.execute(update(agents).where(agents.c.name.in_(names)).values(**values))


def _known(row: Row[Any]) -> KnownAgent:
    reason = None
    try:
        told = read_stored(_REGISTRATION, row.content)
    except ConflictError as error:
        texts: dict[str, Any] = dict.fromkeys(("host", "address", "device_name", "torch_version", "version"), "unknown")
        counts = dict.fromkeys(("port", "devices", "memory_bytes"), 0)
        told = Registration.model_construct(name=row.name, instance=row.instance, **texts | counts)
        reason = str(error)
    return KnownAgent(told=told, unreadable=reason, **columns_of(row, KnownAgent))


_LISTING = Listing(
    table=agents,
    query=select(agents),
    item=_known,
    sorts={"created_at": agents.c.sequence, "last_seen_at": agents.c.last_seen_at},
)
