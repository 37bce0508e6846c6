"""Leases: gives jobs to agents that request work. `choice` first selects candidates, in a transaction that only reads.
This module takes one in a transaction that writes, if no other agent was faster.

A lease's fence counts all leases of a job so far, in the job's row. Every new lease raises it by one (`store.take`,
`store.give_again`). Of two holders, the one with the higher fence is right. It is compared here:

- `gangs.of_job` and `gangs.part_of` find only members with the fence of the job's latest lease.
- `plans.jobs.is_held` asks whether the service's own lease of a job is still the latest.
- The agent's `Mark` in a process's environment distinguishes the processes of different leases.

Reports and heartbeats do not send it: they prove their lease by its token (`service._held`).
"""

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection

from pipeplan.protocol.jobs import Gang, Lease, LeaseRequest, UnreadableTask, refusal
from planner_service.agents import service as agents
from planner_service.agents import store as known_agents
from planner_service.agents.needs import Needs
from planner_service.agents.store import KnownAgent
from planner_service.events import service as events
from planner_service.jobs import gangs as members
from planner_service.jobs import store as storage
from planner_service.jobs.choice import Chosen, heard_lately, nobody_allows
from planner_service.jobs.gangs import Member
from planner_service.jobs.store import Taking
from planner_service.platform.context import Context, found

REFUSED_AT_ONCE = 50


def give(
    context: Context, connection: Connection, request: LeaseRequest, choice: Chosen, now: datetime
) -> Lease | None:
    """One of the chosen jobs, under a new token; None if others have taken them in the meantime, or there are none.

    The time of its statements does not depend on the queue's length, because all writers wait for them.
    """
    agent = agents.asking(connection, request)
    expires_at = context.now() + timedelta(seconds=context.lease_s)  # it may have waited for its turn
    taking = Taking(request.agent, request.instance, _token(), now, expires_at)
    lease = None if agent is None else _given_before(context, connection, taking, agent)
    if lease is not None:
        return lease
    _refuse(connection, choice, agent, now)

    # 1. The oldest suitable job for one node, by one SQL statement.
    alone = choice.places if choice.gang is None else choice.places[:-1]
    job = storage.take(connection, alone, taking)
    if job is not None:
        if agent is not None:
            known_agents.given(connection, (agent.name,), job.id)
        events.record_job(connection, job, now)
        return Lease(job=job, token=taking.token, expires_in_s=context.lease_s)
    # 2. Else the oldest job for several nodes. The agent takes no later job, or this one could wait for ever.
    if choice.gang is not None and agent is not None:
        lease = _given_to_gang(context, connection, taking, agent, choice.places[-1], choice.gang)
    if lease is None and agent is not None:
        known_agents.asked(connection, agent.name, now)
    return lease


def _given_before(context: Context, connection: Connection, taking: Taking, agent: KnownAgent) -> Lease | None:
    """The agent's unreported lease: its part in a gang, or a job whose lease was lost in transit."""
    name, instance = agent.name, agent.told.instance

    part = members.part_of(connection, name, instance)
    if part is not None:
        claim = found("job", part.job_id, storage.claim(connection, part.job_id))
        if isinstance(claim.job.task, UnreadableTask):
            return None
        members.change(connection, part, state="joined", expires_at=taking.expires_at)
        known_agents.given(connection, (name,), part.job_id)
        parts = members.of_job(connection, part.job_id, part.fence)
        gang = _gang(connection, parts, part.node_rank)
        return Lease(job=claim.job, token=part.token, expires_in_s=context.lease_s, gang=gang)

    job_id = storage.held_by(connection, name, instance)
    if job_id is None or isinstance(found("job", job_id, storage.get(connection, job_id)).task, UnreadableTask):
        return None
    storage.give_again(connection, job_id, token=taking.token, expires_at=taking.expires_at, now=taking.now)
    known_agents.given(connection, (name,), job_id)
    job = found("job", job_id, storage.get(connection, job_id))
    return Lease(job=job, token=taking.token, expires_in_s=context.lease_s)


def _refuse(connection: Connection, choice: Chosen, agent: KnownAgent | None, now: datetime) -> None:
    """Ends jobs with a factory that no agent of the last day allows: no agent would ever take them."""
    heard = heard_lately(connection, now) if choice.refused else []
    for needs_id, needs in choice.refused:
        if agent is None or not nobody_allows(needs, heard):
            continue
        for job in storage.needing(connection, needs_id, REFUSED_AT_ONCE):
            if isinstance(job.task, UnreadableTask):
                continue
            reason = refusal(job.task, agent.told.allow)
            storage.end(connection, job.id, state="failed", error=str(reason), now=now)
            events.record_job(connection, found("job", job.id, storage.get(connection, job.id)), now)


def _given_to_gang(
    context: Context, connection: Connection, taking: Taking, agent: KnownAgent, place: int, needs: Needs
) -> Lease | None:
    """Gives the job to all of its agents at once, if enough have requested work lately. Other agents get it with their
    next request. No agent holds a part while it waits for the rest, so two such jobs never wait for each other.
    """
    since = taking.now - timedelta(seconds=context.lease_s / 3)
    others = needs.others(agent, known_agents.idle(connection, since))[: needs.nodes - 1]
    token = taking.token
    job = storage.take(connection, (place,), taking) if 1 + len(others) == needs.nodes else None
    if job is None:
        return None
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
            expires_at=taking.expires_at,
            ended_at=None,
        )
        for rank, known in enumerate(sorted([agent, *others], key=lambda known: known.name))
    ]
    members.give(connection, parts)
    names = [part.agent for part in parts]
    storage.give_to_gang(connection, job.id, names)
    known_agents.given(connection, names, job.id)
    job = found("job", job.id, storage.get(connection, job.id))
    own = next(part.node_rank for part in parts if part.token == token)
    events.record_job(connection, job, taking.now)
    return Lease(job=job, token=token, expires_in_s=context.lease_s, gang=_gang(connection, parts, own))


def _gang(connection: Connection, parts: Sequence[Member], node_rank: int) -> Gang:
    first = found("agent", parts[0].agent, known_agents.named(connection, parts[0].agent)).told
    names = tuple(part.agent for part in parts)
    return Gang(node_rank=node_rank, agents=names, address=first.address, port=first.port)


def _token() -> str:
    return secrets.token_urlsafe(24)
