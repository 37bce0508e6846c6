"""Leases: which job an agent gets that asks for work. Every choice is one transaction.

A job for one node goes to the agent that asks for work: it gets the oldest that it can do, by one SQL statement.

A job for several nodes is given to all of its agents at once, when the last of those that it needs asks for work and
the others have asked lately. No agent holds a part of such a job while it waits for the rest, so two of these jobs
never wait for each other. An agent that could take part in a waiting job for several nodes takes no job that came after
it. Otherwise that job would wait for ever wherever there is always something smaller to do.

A lease's fence is a number in the job's row that counts the leases ever given on the job, whoever got them. Every new
lease raises it by one (`store.take_oldest`, `store.give_again`). Of two holders, the one with the higher fence is
right. Where it is compared:

- `gangs.of_job` and `gangs.part_of` find only members with the fence of the job's latest lease.
- `plans.jobs.is_held` asks whether the service's own lease of a job is still the latest.
- The agent's `Mark` in a process's environment tells the processes of one lease from those of another.

Reports and heartbeats do not send it: they prove their lease by its token (`service._held`).
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
    lease = _given_before(context, connection, asking)
    if lease is not None:
        return lease

    choice = _choice(context, connection, asking)
    token = _token()
    job = storage.take_oldest(
        connection,
        kinds=request.kinds,
        agent=request.agent,
        instance=request.instance,
        token=token,
        now=now,
        expires_at=expires_at,
        needs_ids=tuple(choice.needs),
        before=choice.before,
    )
    if job is None:
        if agent is not None:
            known_agents.asked(connection, agent.name, now)
        return None

    needs = read(storage.needs_of(connection, job.id) or "{}")
    gang = None
    if needs.nodes > 1 and agent is not None:
        parts = _assemble(context, connection, asking, agent, job, needs, token)
        job = found("job", job.id, storage.get(connection, job.id))
        own = next(part.node_rank for part in parts if part.token == token)
        gang = _gang(connection, parts, own)
    elif agent is not None:
        known_agents.given(connection, (agent.name,), job.id)
    events.record_job(connection, job, now)
    return Lease(job=job, token=token, expires_in_s=context.lease_s, gang=gang)


def _given_before(context: Context, connection: Connection, asking: _Asking) -> Lease | None:
    """What the agent has and does not know of: its part in a gang, or a job whose lease was lost on its way."""
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


def _choice(context: Context, connection: Connection, asking: _Asking) -> _Choice:
    """Sorts what waits in the queue: what the agent can take now, and what it must leave room for."""
    waiting = [(group, read(group.needs)) for group in storage.waiting(connection)]
    agent = asking.agent
    if agent is None:
        # It never said what it can do: it takes what is for one node, unless the job names other agents.
        name = asking.request.agent
        alone = {
            group.needs_id: needs
            for group, needs in waiting
            if needs.nodes == 1 and (not needs.agents or name in needs.agents)
        }
        return _Choice(needs=alone, before=None)

    fitting: dict[str, Needs] = {}
    before: list[int] = []
    for group, needs in waiting:
        if needs.lacks(agent) is not None:
            heard = known_agents.heard_since(connection, asking.now - timedelta(days=1))
            if all(needs.refused(other) is not None for other in heard):
                _refuse(connection, group.needs_id, agent, asking.now)
        elif needs.nodes == 1 or _free(context, connection, asking, agent, needs):
            fitting[group.needs_id] = needs
        elif 1 + len(needs.others(agent, agents.alive(context, connection, asking.now))) >= needs.nodes:
            first = storage.first_due(connection, group.needs_id, asking.now)
            before += [] if first is None else [first]
    return _Choice(needs=fitting, before=min(before, default=None))


def _refuse(connection: Connection, needs_id: str, agent: KnownAgent, now: datetime) -> None:
    """Ends jobs that name a factory which no agent heard of in the last day allows: nobody will ever take them."""
    for job in storage.needing(connection, needs_id, REFUSED_AT_ONCE):
        reason = refusal(job.task, agent.told.allow)
        storage.end(connection, job.id, state="failed", error=str(reason), now=now)
        events.record_job(connection, found("job", job.id, storage.get(connection, job.id)), now)


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


def _token() -> str:
    return secrets.token_urlsafe(24)
