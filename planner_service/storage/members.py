"""Members: the agents that do one job together, a row a node, each with a token and a lease of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Row, delete, insert, select, update

from planner_service.storage.tables import jobs, members

MemberState = Literal["given", "joined", "done", "lost"]
"""Not told of it yet; at work; its part is done; it lost the others, or was lost by them."""


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


def give(connection: Connection, given: Sequence[Member]) -> None:
    """Makes these the job's members, in place of those of an earlier lease."""
    connection.execute(delete(members).where(members.c.job_id == given[0].job_id))
    names = Member.__dataclass_fields__
    connection.execute(insert(members), [{name: getattr(member, name) for name in names} for member in given])


def of_job(connection: Connection, job_id: str, fence: int) -> list[Member]:
    """The members of a lease, by node rank. The transaction must hold the job."""
    query = select(members).where(members.c.job_id == job_id, members.c.fence == fence).order_by(members.c.node_rank)
    return [_member(row) for row in connection.execute(query)]


def part_of(connection: Connection, agent: str, instance: str) -> Member | None:
    """The part that this process was given and has not ended; it asks for work, and does not know of it."""
    query = (
        select(members)
        .join(jobs, (jobs.c.id == members.c.job_id) & (jobs.c.fence == members.c.fence))
        .where(
            jobs.c.state == "leased",
            members.c.agent == agent,
            members.c.instance == instance,
            members.c.state.in_(("given", "joined")),
        )
        .order_by(members.c.sequence)
        .limit(1)
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else _member(row)


def change(connection: Connection, member: Member, **values: Any) -> None:
    """Writes down what has become of a member."""
    connection.execute(
        update(members)
        .where(
            members.c.job_id == member.job_id,
            members.c.node_rank == member.node_rank,
            members.c.fence == member.fence,
        )
        .values(**values)
    )


def _member(row: Row[Any]) -> Member:
    return Member(**{name: getattr(row, name) for name in Member.__dataclass_fields__})
