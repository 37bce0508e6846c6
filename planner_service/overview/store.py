"""Store of the overview: counts for the metrics, ids by their first digits, and the first page's rows.

It counts only rows that an index finds, never a whole table.
"""

from datetime import datetime

from sqlalchemy import Connection, Table, func, literal, select

from pipeplan.protocol.listing import Noun
from pipeplan.protocol.runs import RunSummary
from planner_service.platform.tables import agents, clusters, jobs, plans, profiles, runs

PENDING = ("queued", "leased")
"""The states of jobs that have not ended: these rows stay few, however many have ended."""

MOST_MODELS = 200
"""The upper bound on the models among which the newest are searched."""

LONGEST_NAME = 500
"""The longest name by which a list can be filtered."""

NOUNS: dict[Noun, Table] = {"profile": profiles, "cluster": clusters, "plan": plans, "job": jobs, "run": runs}
"""The nouns whose ids can be found by a prefix."""


def ids_beginning(connection: Connection, noun: Noun, prefix: str, limit: int) -> tuple[str, ...]:
    """The first ids with this prefix, found by the index of the ids. No hexadecimal digit comes after g."""
    column = NOUNS[noun].c.id
    query = select(column).where(column >= prefix, column < prefix + "g").order_by(column).limit(limit)
    return tuple(connection.execute(query).scalars())


def newest_models(connection: Connection, limit: int) -> tuple[str, ...]:
    """The models for which plans were made last, among the first MOST_MODELS names that are not too long.

    Every step finds the next name in an index: the plans of a model are not read, however many there are.
    """
    found = select(func.min(plans.c.model_name).label("name"), literal(1).label("place")).cte("found", recursive=True)
    name = select(func.min(plans.c.model_name)).where(plans.c.model_name > found.c.name).scalar_subquery()
    found = found.union_all(
        select(name, found.c.place + 1).where(found.c.name.is_not(None), found.c.place < MOST_MODELS)
    )
    newest = select(func.max(plans.c.created_at)).where(plans.c.model_name == found.c.name).scalar_subquery()
    asked_for = func.length(found.c.name) <= LONGEST_NAME
    query = (
        select(found.c.name)
        .where(found.c.name.is_not(None), asked_for)
        .order_by(newest.desc(), found.c.name)
        .limit(limit)
    )
    return tuple(connection.execute(query).scalars())


def measured_runs(connection: Connection, limit: int) -> tuple[RunSummary, ...]:
    """The newest runs that have succeeded, by the index of jobs in a state."""
    ended = (
        select(jobs.c.id, jobs.c.sequence, jobs.c.state, jobs.c.updated_at)
        .where(jobs.c.state == "succeeded", jobs.c.kind == "run")
        .order_by(jobs.c.sequence.desc())
        .limit(limit)
        .subquery()
    )
    joined = ended.join(runs, runs.c.job_id == ended.c.id).join(plans, plans.c.id == runs.c.plan_id)
    own = [runs.c[name] for name in RunSummary.model_fields if name in runs.c]
    query = select(*own, plans.c.model_name.label("model"), plans.c.schedule, ended.c.state, ended.c.updated_at)
    rows = connection.execute(query.select_from(joined).order_by(ended.c.sequence.desc()))
    return tuple(RunSummary.model_construct(**row._mapping) for row in rows)


def jobs_by_kind_and_state(connection: Connection) -> dict[tuple[str, str], int]:
    """How many jobs of each kind are in each state that still has work to do."""
    query = select(jobs.c.kind, jobs.c.state, func.count()).where(jobs.c.state.in_(PENDING))
    rows = connection.execute(query.group_by(jobs.c.kind, jobs.c.state))
    return {(kind, state): count for kind, state, count in rows}


def agents_alive(connection: Connection, since: datetime) -> int:
    """How many agents were heard of since then."""
    query = select(func.count()).select_from(agents).where(agents.c.last_seen_at >= since)
    return connection.execute(query).scalar_one()
