"""Gangs: the agents that do one job together. Each has a row, a token and a lease of its own; they end together.

    given ──asks──▶ joined ──its part is done──▶ done
      │               └────lost the others──────▶ lost
      └───its lease runs out: the whole attempt ends

A member that lost the others does not end the attempt immediately: the member that caused the failure may still report
it. The attempt ends when all members have ended, or when the lease of one that still works expires.

A member belongs to one lease of its job, which the fence names (`leases`). Members of an earlier fence no longer count.
"""

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Connection, Row, bindparam, delete, insert, select, update

from pipeplan.protocol.jobs import Job
from planner_service.platform.context import Context
from planner_service.platform.stored import columns_of
from planner_service.platform.tables import jobs, members

PATIENCE = 6
"""The others must stop 1/PATIENCE of a lease's length after a member was lost; by then the cause has been reported."""

MemberState = Literal["given", "joined", "done", "lost"]
"""A member has not heard of its part yet; works on it; has done it; has lost the others or was lost by them."""

_PART_OF = (
    select(members)
    .join(jobs, (jobs.c.id == members.c.job_id) & (jobs.c.fence == members.c.fence))
    .where(
        jobs.c.state == "leased",
        members.c.agent == bindparam("by_agent"),
        members.c.instance == bindparam("by_instance"),
        members.c.state.in_(("given", "joined")),
    )
    .order_by(members.c.sequence)
    .limit(1)
)
"""Made once: every request for work that may get a job executes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node's part in one lease of a job."""

    job_id: str
    node_rank: int
    fence: int
    agent: str
    instance: str
    token: str
    state: MemberState
    error: str | None
    expires_at: datetime
    ended_at: datetime | None

    @property
    def working(self) -> bool:
        """Whether its lease counts."""
        return self.state in ("given", "joined")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A job and its holder: the owner of the lease's token, one of several where `member` is given."""

    job: Job
    result_id: str | None
    member: Member | None = None

    @property
    def agent(self) -> str | None:
        """The holder's name; None where it is the service."""
        return self.member.agent if self.member is not None else self.job.agent


def give(connection: Connection, given: Sequence[Member]) -> None:
    """Stores the job's members, in place of those of an earlier lease."""
    connection.execute(delete(members).where(members.c.job_id == given[0].job_id))
    connection.execute(insert(members), [asdict(member) for member in given])


def of_job(connection: Connection, job_id: str, fence: int) -> list[Member]:
    """The members of the lease with this fence, by node rank. The transaction must hold the job."""
    query = select(members).where(members.c.job_id == job_id, members.c.fence == fence).order_by(members.c.node_rank)
    return [_member(row) for row in connection.execute(query)]


def part_of(connection: Connection, agent: str, instance: str) -> Member | None:
    """The part that this process was given and has not ended. It asks for work, so it does not know of the part."""
    row = connection.execute(_PART_OF, {"by_agent": agent, "by_instance": instance}).one_or_none()
    return None if row is None else _member(row)


def change(connection: Connection, member: Member, **values: Any) -> None:
    """Changes these columns of a member's row."""
    keys = (members.c[name] == getattr(member, name) for name in ("job_id", "node_rank", "fence"))
    connection.execute(update(members).where(*keys).values(**values))


def member_of(connection: Connection, job: Job, token: str) -> Member | None:
    """The member of the job's latest lease with this token."""
    if not job.agents:
        return None
    parts = of_job(connection, job.id, job.fence)
    return next((part for part in parts if secrets.compare_digest(part.token.encode(), token.encode())), None)


def renew(context: Context, connection: Connection, hold: Hold, now: datetime) -> str | None:
    """Renews a member's lease. Returns why it should stop if another member was lost some time ago."""
    if hold.member is None:
        return None
    if hold.member.working:
        expires_at = now + timedelta(seconds=context.lease_s)
        change(connection, hold.member, state="joined", expires_at=expires_at)
    before = now - timedelta(seconds=context.lease_s / PATIENCE)
    for part in of_job(connection, hold.job.id, hold.job.fence):
        if part.state == "lost" and part.ended_at is not None and part.ended_at <= before:
            return f"agent {part.agent} ended early: {part.error}"
    return None


def expires_at(connection: Connection, job: Job) -> datetime | None:
    """When the first lease of a working member expires; None if no member works."""
    parts = of_job(connection, job.id, job.fence)
    return min((part.expires_at for part in parts if part.working), default=None)


def bring_back(connection: Connection, lease_ends: datetime) -> None:
    """Ends the members' leases no later than this."""
    connection.execute(update(members).where(members.c.expires_at > lease_ends).values(expires_at=lease_ends))


def late(connection: Connection, job: Job, now: datetime) -> str | None:
    """The members of a gang whose lease expired; None for a job without a gang."""
    if not job.agents:
        return None
    parts = of_job(connection, job.id, job.fence)
    names = [part.agent for part in parts if part.working and part.expires_at <= now]
    told = [f"agent {part.agent} ended early ({part.error})" for part in parts if part.state == "lost"]
    return "; ".join([*told, f"agent {names[0]}" if names else f"agent {job.agent}"])


def done(connection: Connection, hold: Hold, now: datetime) -> None:
    """Ends a member's part as done."""
    if hold.member is not None:
        change(connection, hold.member, state="done", ended_at=now)


def lost(connection: Connection, hold: Hold, error: str, now: datetime) -> bool:
    """Ends a member's part as lost. Returns whether the attempt has ended with it; for a single agent it always has."""
    if hold.member is None:
        return True
    change(connection, hold.member, state="lost", error=error, ended_at=now)
    return expires_at(connection, hold.job) is None


def _member(row: Row[Any]) -> Member:
    return Member(**columns_of(row, Member))
