"""Store of the overview: counts for the metrics, ids by their heads, what the first page shows, and the removers of
retention.

Counts are of rows that an index finds, never of a whole table. A remover removes what is older than a moment and nobody
needs. It removes at most `limit` rows and returns how many. A plan goes after its runs, a profile and a cluster after
the plans made from them.
"""

from collections.abc import Callable, Iterable
from datetime import datetime

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, Connection, Table, and_, delete, func, literal, select

from pipeplan.protocol.estimates import EstimateTask
from pipeplan.protocol.jobs import PlanTask
from pipeplan.protocol.listing import Noun
from pipeplan.protocol.plans import PlanRequest
from pipeplan.protocol.runs import RunSummary
from planner_service.platform.stored import read_stored
from planner_service.platform.tables import UtcTime, agents, alias_moves, aliases, clusters, jobs, plans, profiles, runs

PENDING = ("queued", "leased")
"""The states of jobs that have not ended: these rows stay few, however many have ended."""

ENDED = ("succeeded", "failed", "cancelled", "dead")

MOST_MODELS = 200
"""The most models among which the newest are looked for."""

LONGEST_NAME = 500
"""The longest name that a list can be asked for."""

Remove = Callable[[Connection, datetime, int], int]
"""Removes rows from before a moment, at most so many; returns how many."""

_TASK, _ESTIMATE, _REQUEST = TypeAdapter(PlanTask), TypeAdapter(EstimateTask), TypeAdapter(PlanRequest)


NOUNS: dict[Noun, Table] = {"profile": profiles, "cluster": clusters, "plan": plans, "job": jobs, "run": runs}
"""Whose ids can be looked for by their heads."""


def ids_beginning(connection: Connection, noun: Noun, prefix: str, limit: int) -> tuple[str, ...]:
    """The first ids that begin so: an index of the ids finds them. No hexadecimal digit comes after g."""
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
    """How many jobs there are of each kind in each state in which work is left to do."""
    query = select(jobs.c.kind, jobs.c.state, func.count()).where(jobs.c.state.in_(PENDING))
    rows = connection.execute(query.group_by(jobs.c.kind, jobs.c.state))
    return {(kind, state): count for kind, state, count in rows}


def agents_alive(connection: Connection, since: datetime) -> int:
    """How many agents were heard of since then."""
    query = select(func.count()).select_from(agents).where(agents.c.last_seen_at >= since)
    return connection.execute(query).scalar_one()


def remove_runs(connection: Connection, before: datetime, limit: int) -> int:
    """Runs that ended before the moment, with their jobs, measurements and events."""
    query = select(jobs.c.id, runs.c.id).join_from(jobs, runs, runs.c.job_id == jobs.c.id).where(_ended(before))
    rows = connection.execute(query.order_by(jobs.c.sequence).limit(limit)).all()
    connection.execute(delete(runs).where(runs.c.id.in_([run_id for _, run_id in rows])))
    connection.execute(delete(jobs).where(jobs.c.id.in_([job_id for job_id, _ in rows])))
    return len(rows)


def remove_jobs(connection: Connection, before: datetime, limit: int) -> int:
    """Other jobs that ended before the moment, with their events."""
    return _remove(connection, jobs, and_(_ended(before), jobs.c.id.not_in(select(runs.c.job_id))), limit)


def remove_plans(connection: Connection, before: datetime, limit: int) -> int:
    """Plans made before the moment of which no run is left, and at which no alias has pointed since."""
    # An alias that has moved away since then keeps its plan: one step back must stay possible.
    left_at = func.lead(alias_moves.c.moved_at, type_=UtcTime()).over(
        partition_by=alias_moves.c.name, order_by=alias_moves.c.sequence
    )
    moves = select(alias_moves.c.plan_id, left_at.label("left_at")).subquery()
    left_plans = select(moves.c.plan_id).where(moves.c.plan_id.is_not(None), moves.c.left_at >= before)

    needed = (select(runs.c.plan_id), select(aliases.c.plan_id), left_plans)
    return _remove(connection, plans, and_(plans.c.created_at < before, *(plans.c.id.not_in(n) for n in needed)), limit)


def remove_profiles(connection: Connection, before: datetime, limit: int) -> int:
    """Profiles stored before the moment that no plan was made from, that no job that is left gave or will plan with."""
    named = {name for request in _requests(connection) for name in (request.profile_id, *request.other_profile_ids)}
    return _remove_documents(connection, profiles, plans.c.profile_id, jobs.c.profile_id, named, before, limit)


def remove_clusters(connection: Connection, before: datetime, limit: int) -> int:
    """Clusters stored before the moment that no plan was made from, that no job that is left gave or will plan with."""
    named = {request.cluster_id for request in _requests(connection)}
    estimates = select(jobs.c.task).where(jobs.c.kind == "estimate", jobs.c.state.not_in(ENDED))
    named |= {read_stored(_ESTIMATE, task).request.cluster_id for task in connection.execute(estimates).scalars()}
    return _remove_documents(connection, clusters, plans.c.cluster_id, jobs.c.cluster_id, named, before, limit)


def remove_agents(connection: Connection, before: datetime, limit: int) -> int:
    """Agents that were last heard of before the moment and have no job."""
    return _remove(connection, agents, and_(agents.c.last_seen_at < before, agents.c.job_id.is_(None)), limit)


REMOVERS: dict[str, Remove] = {
    "runs": remove_runs,
    "jobs": remove_jobs,
    "plans": remove_plans,
    "profiles": remove_profiles,
    "clusters": remove_clusters,
    "agents": remove_agents,
}
"""By noun, the removers, in the order in which they must run."""


def _ended(before: datetime) -> ColumnElement[bool]:
    return and_(jobs.c.state.in_(ENDED), jobs.c.updated_at < before)


def _requests(connection: Connection) -> Iterable[PlanRequest]:
    """The requests of plan jobs that have not ended, and of kept plans that were asked for with several profiles."""
    waiting = select(jobs.c.task).where(jobs.c.kind == "plan", jobs.c.state.not_in(ENDED))
    for task in connection.execute(waiting).scalars():
        yield read_stored(_TASK, task).request
    several = select(plans.c.request).where(plans.c.request.like('%"other\\_profile\\_ids":["%', escape="\\"))
    for request in connection.execute(several).scalars():
        yield read_stored(_REQUEST, request)


def _remove_documents(
    connection: Connection,
    table: Table,
    in_plans: ColumnElement[str],
    in_jobs: ColumnElement[str],
    named: set[str],
    before: datetime,
    limit: int,
) -> int:
    unused = and_(
        table.c.created_at < before,
        table.c.id.not_in(select(in_plans)),
        table.c.id.not_in(select(in_jobs).where(in_jobs.is_not(None))),
        table.c.id.not_in(sorted(named)),
    )
    return _remove(connection, table, unused, limit)


def _remove(connection: Connection, table: Table, condition: ColumnElement[bool], limit: int) -> int:
    some = select(table.c.id).where(condition).order_by(table.c.sequence).limit(limit)
    ids = connection.execute(some).scalars().all()
    connection.execute(delete(table).where(table.c.id.in_(ids)))
    return len(ids)
