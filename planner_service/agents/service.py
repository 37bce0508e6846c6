"""Agents: they register, send heartbeats, and count as lost when they are silent for longer than a lease."""

import secrets
from datetime import datetime, timedelta

from sqlalchemy import Connection

from pipeplan.documents.names import require_line, require_own_name
from pipeplan.errors import ConflictError, ForbiddenError, NotFoundError
from pipeplan.protocol.agents import Agent, AgentQuery, Presence, Registration
from pipeplan.protocol.jobs import LeaseRequest
from pipeplan.protocol.listing import Page
from pipeplan.protocol.tokens import LOCAL, Identity
from planner_service.access import store as tokens
from planner_service.agents import store as storage
from planner_service.agents.needs import most_processes
from planner_service.agents.store import KnownAgent
from planner_service.platform import trail
from planner_service.platform.context import Context, found

ASKS_KNOWN = 6
"""How often in a lease's length it is recorded that an agent asks for work; not every request is recorded."""


def register(context: Context, told: Registration, *, by: Identity = LOCAL) -> tuple[Agent, bool]:
    """Stores an agent's registration, and returns whether its name is new. A repetition changes only the time.

    A new process of the same name replaces the older one, which is refused from then on. Raises InvalidInputError for
    a text that does not print as one line or a name that could be mistaken for another, ForbiddenError where the name
    belongs to another's token.
    """
    require_own_name("name", told.name)
    for field, value in told.model_dump().items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                require_line(field, text)
    now = context.now()
    with context.database.write() as connection:
        known = storage.claim(connection, told.name)
        _require_own(connection, known, by, now)
        if known is not None and known.unreadable is None and (known.told, known.token_id) == (told, by.token_id):
            storage.seen(connection, told.name, now, draining=False)
        else:
            storage.register(connection, known.id if known else secrets.token_hex(16), told, now, by.token_id)
        registered = found("agent", told.name, storage.named(connection, told.name))
        trail.record(connection, "agent.register", registered.id, now, agent=told.name)
        return _shown(context, registered, now), known is None


def present(context: Context, agent_id: str, presence: Presence, *, by: Identity = LOCAL) -> Agent:
    """Records that the agent is alive, and whether it drains.

    Raises NotFoundError, ConflictError for an older process, ForbiddenError where the name belongs to another's token.
    """
    now = context.now()
    with context.database.write() as connection:
        name = found("agent", agent_id, storage.get(connection, agent_id)).name
        known = found("agent", name, storage.claim(connection, name))
        _require_own(connection, known, by, now)
        require_readable(known)
        _require_instance(known, presence.instance)
        storage.seen(connection, name, now, draining=presence.draining)
        if presence.draining and not known.draining:
            trail.record(connection, "agent.present", known.id, now, agent=name, detail="it drains")
        return _shown(context, found("agent", name, storage.named(connection, name)), now)


def get(context: Context, agent_id: str) -> Agent:
    """The agent, by its id or its name. Raises NotFoundError."""
    with context.database.read() as connection:
        return _shown(context, found("agent", agent_id, storage.get(connection, agent_id)), context.now())


def page(context: Context, query: AgentQuery) -> Page[Agent]:
    """The agents that the query asks for."""
    now = context.now()
    with context.database.read() as connection:
        known = storage.page(connection, query)
    return Page(items=tuple(_shown(context, one, now) for one in known.items), next_cursor=known.next_cursor)


def asking(connection: Connection, request: LeaseRequest) -> KnownAgent | None:
    """The agent that asks for work; None for one that never registered. Raises ConflictError for an older process."""
    if request.instance is None:
        return None
    known = found("agent", request.agent, storage.claim(connection, request.agent))
    require_readable(known)
    _require_instance(known, request.instance)
    return known


def is_fresh(context: Context, known: KnownAgent | None, now: datetime) -> bool:
    """Whether a request of this agent for work was recorded recently enough."""
    since = now - timedelta(seconds=context.lease_s / ASKS_KNOWN)
    return known is not None and known.asked_at is not None and known.asked_at > since


def alive(context: Context, connection: Connection, now: datetime) -> list[KnownAgent]:
    """The agents that take jobs."""
    since = now - timedelta(seconds=context.lease_s)
    return [known for known in storage.heard_since(connection, since) if not known.draining]


def require_own(connection: Connection, name: str, by: Identity, now: datetime) -> None:
    """Raises ForbiddenError where the agent's name belongs to another's token, and InvalidInputError for a new
    one that could be mistaken for another.
    """
    known = storage.named(connection, name)
    if known is None:
        require_own_name("agent", name)
    _require_own(connection, known, by, now)


def _require_own(connection: Connection, known: KnownAgent | None, by: Identity, now: datetime) -> None:
    free = known is None or known.token_id in (None, by.token_id)
    if known is None or free or by.token_id is None or "admin" in by.scopes:
        return
    token = tokens.get(connection, known.token_id or "")
    if token is not None and token.revoked_at is None and (token.expires_at is None or token.expires_at > now):
        rule = f"belongs to the token {token.name!r}, which registered it; use that, or revoke it first"
        raise ForbiddenError(f"the agent's name {known.name!r} {rule}")


def require_readable(known: KnownAgent) -> None:
    """Raises NotFoundError for an agent that registered with another release: it then registers anew."""
    if known.unreadable is not None:
        raise NotFoundError(f"agent {known.name} must register again: {known.unreadable}")


def _require_instance(known: KnownAgent, instance: str) -> None:
    if known.told.instance != instance:
        raise ConflictError(f"another process has registered as agent {known.name}: give one of them another name")


def _shown(context: Context, known: KnownAgent, now: datetime) -> Agent:
    lost = now - known.last_seen_at > timedelta(seconds=context.lease_s)
    told = known.told.model_dump(exclude={"instance", "max_processes"})
    return Agent(
        **told,
        id=known.id,
        state="lost" if lost else "draining" if known.draining else "alive",
        max_processes=most_processes(known),
        job_id=known.job_id,
        unreadable=known.unreadable,
        registered_at=known.registered_at,
        last_seen_at=known.last_seen_at,
    )
