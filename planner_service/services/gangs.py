"""Gangs: agents that do one job together. Each has a lease of its own; they end together.

    given ──asks──▶ joined ──its part is done──▶ done
      │               └────lost the others──────▶ lost
      └───its lease runs out: the whole attempt ends

A member that lost the others does not end the attempt at once: the one that was the cause may still say what it was.
The attempt ends when all have ended, or when the lease of one that is still at it runs out.
"""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection

from planner_service.contract.jobs import Job
from planner_service.services.context import Context
from planner_service.storage import members as storage
from planner_service.storage.members import Member

PATIENCE = 6
"""Others are told to stop after so many parts of a lease's length: the cause has been reported by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A job in the hands of a token's owner, who is one of several where it has a `member`."""

    job: Job
    result_id: str | None
    member: Member | None = None


def member_of(connection: Connection, job: Job, token: str) -> Member | None:
    """The member of the job's latest lease whose token this is."""
    if not job.agents:
        return None
    parts = storage.of_job(connection, job.id, job.fence)
    return next((part for part in parts if secrets.compare_digest(part.token.encode(), token.encode())), None)


def renew(context: Context, connection: Connection, hold: Hold, now: datetime) -> str | None:
    """Renews a member's lease. Returns why it should stop, where another has lost its part for some time."""
    if hold.member is None:
        return None
    if hold.member.working:
        expires_at = now + timedelta(seconds=context.lease_s)
        storage.change(connection, hold.member, state="joined", expires_at=expires_at)
    before = now - timedelta(seconds=context.lease_s / PATIENCE)
    for part in storage.of_job(connection, hold.job.id, hold.job.fence):
        if part.state == "lost" and part.ended_at is not None and part.ended_at <= before:
            return f"agent {part.agent} ended early: {part.error}"
    return None


def expires_at(connection: Connection, job: Job) -> datetime | None:
    """When the first lease runs out of those members who are at it; None where there are none."""
    parts = storage.of_job(connection, job.id, job.fence)
    return min((part.expires_at for part in parts if part.working), default=None)


def late(connection: Connection, job: Job, now: datetime) -> str | None:
    """Who of a gang let its lease run out."""
    if not job.agents:
        return None
    parts = storage.of_job(connection, job.id, job.fence)
    names = [part.agent for part in parts if part.working and part.expires_at <= now]
    told = [f"agent {part.agent} ended early ({part.error})" for part in parts if part.state == "lost"]
    return "; ".join([*told, f"agent {names[0]}" if names else f"agent {job.agent}"])


def done(connection: Connection, hold: Hold, now: datetime) -> None:
    """A member is through with its part."""
    if hold.member is not None:
        storage.change(connection, hold.member, state="done", ended_at=now)


def lost(connection: Connection, hold: Hold, error: str, now: datetime) -> bool:
    """A member's part has come to nothing; says whether the attempt has ended with it. Alone it always has."""
    if hold.member is None:
        return True
    storage.change(connection, hold.member, state="lost", error=error, ended_at=now)
    return expires_at(connection, hold.job) is None
