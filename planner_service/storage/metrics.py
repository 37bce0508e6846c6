"""Counts for the metrics: of rows that an index finds, never of a whole table."""

from datetime import datetime

from sqlalchemy import Connection, func, select

from planner_service.storage.tables import agents, jobs

PENDING = ("queued", "leased")
"""Jobs that have not ended: as many as there is work, however many have ended."""


def jobs_by_kind_and_state(connection: Connection) -> dict[tuple[str, str], int]:
    """How many jobs there are of each kind in each state in which work is left to do."""
    query = select(jobs.c.kind, jobs.c.state, func.count()).where(jobs.c.state.in_(PENDING))
    rows = connection.execute(query.group_by(jobs.c.kind, jobs.c.state))
    return {(kind, state): count for kind, state, count in rows}


def agents_alive(connection: Connection, since: datetime) -> int:
    """How many agents were heard of since then."""
    query = select(func.count()).select_from(agents).where(agents.c.last_seen_at >= since)
    return connection.execute(query).scalar_one()
