"""Leases: which job an agent gets that asks for work. Every choice is one transaction.

An agent alone gets the oldest job that it can do, in one statement. A job for several nodes is given to all of its
agents at once, when the last of those that it needs asks for work and the others have asked lately: nobody holds a part
of it while it waits for the rest, so that no two such jobs wait for each other. An agent that could take part in one
that waits takes no job that came after it: it would wait for ever where there is always something smaller to do.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection

from pipeplan.protocol.jobs import Gang, Job, Lease, LeaseRequest, refusal
from planner_service.agents import service as agents
from planner_service.agents import store as known_agents
from planner_service.agents.needs import Needs, read
from planner_service.agents.store import KnownAgent
from planner_service.events import service as events
from planner_service.jobs import gangs as members
from planner_service.jobs import store as storage
from planner_service.jobs.gangs import Member
from planner_service.jobs.store import WaitingNeeds
from planner_service.platform.context import Context, found

REFUSED_AT_ONCE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asking:
    """One request for work: who asks, and when. `agent` is None where it never registered."""

    request: LeaseRequest
    agent: KnownAgent | None
    now: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What the agent may take: jobs with these needs, of those that came before some place."""

    needs: dict[str, Needs]
    before: int | None


def give(context: Context, connection: Connection, request: LeaseRequest, now: datetime) -> Lease | None:
    """The oldest job for the agent, under a token of its own; None where there is nothing for it."""
    agent = agents.asking(connection, request)
    expires_at = now + timedelta(seconds=context.lease_s)
    asking = _Asking(request=request, agent=agent, now=now, expires_at=expires_at)
    lease = _given_before(context, connection, asking) or _take(context, connection, asking)
    if lease is None and agent is not None:
        known_agents.asked(connection, agent.name, now)
    return lease


def _given_before(context: Context, connection: Connection, asking: _Asking) -> Lease | None:
    """What the agent has and does not know of: its part in a gang, or an answer that was lost on its way."""
    if asking.agent is None:
        return None
    name, instance = asking.agent.name, asking.agent.told.instance
    part = members.part_of(connection, name, instance)
    if part is not None:
        claim = found("job", part.job_id, storage.claim(connection, part.job_id))
        members.change(connection, part, state="joined", expires_at=asking.expires_at)
        known_agents.given(connection, (name,), part.job_id)
        parts = members.of_job(connection, part.job_id, part.fence)
        gang = _gang(connection, parts, part.node_rank)
        return Lease(job=claim.job, token=part.token, expires_in_s=context.lease_s, gang=gang)
    job_id = storage.held_by(connection, name, instance)
    if job_id is None:
        return None
    token = _token()
    storage.give_again(connection, job_id, token=token, expires_at=asking.expires_at, now=asking.now)
    known_agents.given(connection, (name,), job_id)
    job = found("job", job_id, storage.get(connection, job_id))
    return Lease(job=job, token=token, expires_in_s=context.lease_s)


def _take(context: Context, connection: Connection, asking: _Asking) -> Lease | None:
    choice = _choice(context, connection, asking)
    token = _token()
    job = storage.take_oldest(
        connection,
        kinds=asking.request.kinds,
        agent=asking.request.agent,
        instance=asking.request.instance,
        token=token,
        now=asking.now,
        expires_at=asking.expires_at,
        needs_ids=tuple(choice.needs),
        before=choice.before,
    )
    if job is None:
        return None
    needs = read(storage.needs_of(connection, job.id) or "{}")
    gang = None
    if needs.nodes > 1 and asking.agent is not None:
        parts = _assemble(context, connection, asking, asking.agent, job, needs, token)
        job = found("job", job.id, storage.get(connection, job.id))
        own = next(part.node_rank for part in parts if part.token == token)
        gang = _gang(connection, parts, own)
    elif asking.agent is not None:
        known_agents.given(connection, (asking.agent.name,), job.id)
    events.record_job(connection, job, asking.now)
    return Lease(job=job, token=token, expires_in_s=context.lease_s, gang=gang)


def _choice(context: Context, connection: Connection, asking: _Asking) -> _Choice:
    waiting = [(group, read(group.needs)) for group in storage.waiting(connection)]
    if asking.agent is None:
        alone = {group.needs_id: needs for group, needs in waiting if _fits_anybody(needs, asking.request.agent)}
        return _Choice(needs=alone, before=None)
    fitting: dict[str, Needs] = {}
    before: list[int] = []
    for group, needs in waiting:
        if needs.lacks(asking.agent) is not None:
            _refuse(context, connection, asking, group, needs)
        elif needs.nodes == 1 or _free(context, connection, asking, asking.agent, needs):
            fitting[group.needs_id] = needs
        elif 1 + len(needs.others(asking.agent, agents.alive(context, connection, asking.now))) >= needs.nodes:
            first = storage.first_due(connection, group.needs_id, asking.now)
            before += [] if first is None else [first]
    return _Choice(needs=fitting, before=min(before, default=None))


def _fits_anybody(needs: Needs, name: str) -> bool:
    """Whether an agent that never said what it can do may take it: alone, and none other is named."""
    return needs.nodes == 1 and (not needs.agents or name in needs.agents)


def _free(
    context: Context, connection: Connection, asking: _Asking, agent: KnownAgent, needs: Needs
) -> list[KnownAgent]:
    """The agents for a gang with this one, by name, this one among them; none if there are not enough free now."""
    since = asking.now - timedelta(seconds=context.lease_s / 3)
    others = needs.others(agent, known_agents.idle(connection, since))[: needs.nodes - 1]
    enough = 1 + len(others) == needs.nodes
    return sorted([agent, *others], key=lambda known: known.name) if enough else []


def _assemble(
    context: Context, connection: Connection, asking: _Asking, agent: KnownAgent, job: Job, needs: Needs, token: str
) -> list[Member]:
    """Gives the job to all of its agents. Whoever asked has it; the others hear of it when they ask next."""
    chosen = _free(context, connection, asking, agent, needs)
    parts = [
        Member(
            job_id=job.id,
            node_rank=rank,
            fence=job.fence,
            agent=known.name,
            instance=known.told.instance,
            token=token if known.name == agent.name else _token(),
            state="joined" if known.name == agent.name else "given",
            error=None,
            expires_at=asking.expires_at,
            ended_at=None,
        )
        for rank, known in enumerate(chosen)
    ]
    members.give(connection, parts)
    names = [part.agent for part in parts]
    storage.give_to_gang(connection, job.id, names)
    known_agents.given(connection, names, job.id)
    return parts


def _gang(connection: Connection, parts: Sequence[Member], node_rank: int) -> Gang:
    first = found("agent", parts[0].agent, known_agents.get(connection, parts[0].agent)).told
    names = tuple(part.agent for part in parts)
    return Gang(node_rank=node_rank, agents=names, address=first.address, port=first.port)


def _refuse(context: Context, connection: Connection, asking: _Asking, group: WaitingNeeds, needs: Needs) -> None:
    """Ends jobs that name a factory which no agent heard of in the last day allows: nobody will ever take them."""
    heard = known_agents.heard_since(connection, asking.now - timedelta(days=1))
    if asking.agent is None or any(needs.refused(agent) is None for agent in heard):
        return
    for job in storage.needing(connection, group.needs_id, REFUSED_AT_ONCE):
        reason = refusal(job.task, asking.agent.told.allow)
        storage.end(connection, job.id, state="failed", error=str(reason), now=asking.now)
        events.record_job(connection, found("job", job.id, storage.get(connection, job.id)), asking.now)


def _token() -> str:
    return secrets.token_urlsafe(24)
