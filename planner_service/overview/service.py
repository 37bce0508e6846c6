"""Overview: the first page's content, the metrics that come from the database, and ids by their first digits."""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import QueuePool, event
from sqlalchemy.engine import ExceptionContext

from pipeplan.errors import PipeplanError
from pipeplan.protocol.jobs import Job, JobState
from pipeplan.protocol.listing import IdQuery, Matches
from pipeplan.protocol.plans import PlanQuery, PlanSummary
from pipeplan.protocol.runs import RunSummary
from planner_service.jobs import service as jobs
from planner_service.overview import store as storage
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.platform.listing import Cut
from planner_service.platform.metrics import Stored

ALIVE_S = 90.0
"""An agent with a request within this time is alive."""

MODELS = 6
PLANS_A_MODEL = 20
MEASURED = 40
JOBS = 5
"""Upper bounds of the first page: models, the newest plans of each, measured runs, and jobs of a kind of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlans:
    """A model's best plan, which is the one with the highest played throughput, and its newest plans."""

    best: PlanSummary
    newest: tuple[PlanSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """The first page's content. `queued` and `leased` count all jobs; `under_way` and `failed` are the newest ones."""

    models: tuple[ModelPlans, ...]
    measured: tuple[RunSummary, ...]
    under_way: tuple[Job, ...]
    failed: tuple[Job, ...]
    queued: int
    leased: int
    agents_alive: int


def glance(context: Context) -> Glance:
    """The best plans, the measured runs, running and failed jobs. Every query reads rows that an index finds."""
    with context.database.read() as connection:
        names = storage.newest_models(connection, MODELS)
        pending = storage.jobs_by_kind_and_state(connection)
        alive = storage.agents_alive(connection, context.now() - timedelta(seconds=ALIVE_S))
    models = []
    for name in names:
        newest = newest_plans(context, name)
        best = plans.page(context, PlanQuery(model=name, sort="-throughput", limit=1)).items
        models += [ModelPlans(best=one, newest=newest) for one in best]
    failed = (*_newest(context, "failed"), *_newest(context, "dead"))
    return Glance(
        models=tuple(models),
        measured=measured_runs(context),
        under_way=(*_newest(context, "leased"), *_newest(context, "queued"))[:JOBS],
        failed=tuple(sorted(failed, key=lambda job: job.updated_at, reverse=True)[:JOBS]),
        queued=sum(count for (_, state), count in pending.items() if state == "queued"),
        leased=sum(count for (_, state), count in pending.items() if state == "leased"),
        agents_alive=alive,
    )


def newest_plans(context: Context, model: str) -> tuple[PlanSummary, ...]:
    """The newest plans of a model, as many as the first page draws."""
    return plans.page(context, PlanQuery(model=model, limit=PLANS_A_MODEL)).items


def measured_runs(context: Context) -> tuple[RunSummary, ...]:
    """The newest runs that have succeeded, as many as the first page draws."""
    with context.database.read() as connection:
        return storage.measured_runs(connection, MEASURED)


def _newest(context: Context, state: JobState) -> tuple[Job, ...]:
    # One state at a time: an index has the jobs of each state in order.
    return jobs.newest(context, Cut(limit=JOBS), (state,)).items


MOST_IDS = 10
"""The upper bound on ids in an answer to a prefix."""


def ids(context: Context, query: IdQuery) -> Matches:
    """The first ids of a noun with this prefix."""
    with context.database.read() as connection:
        found = storage.ids_beginning(connection, query.noun, query.prefix, MOST_IDS + 1)
    return Matches(ids=found[:MOST_IDS], more=len(found) > MOST_IDS)


def watch(context: Context) -> None:
    """Connects the context's metrics to its database."""
    metrics, engine = context.metrics, context.database.engine

    def failed(error: ExceptionContext) -> None:
        metrics.database_errors.labels(type(error.sqlalchemy_exception or error.original_exception).__name__).inc()

    event.listen(engine, "handle_error", failed)
    pool = engine.pool
    if isinstance(pool, QueuePool):
        metrics.pool_in_use.set_function(lambda: float(pool.checkedout()))
    metrics.watch_stored(lambda: stored(context))


def stored(context: Context) -> Stored | None:
    """The database's present counts; None if it cannot be read."""
    alive_since = context.now() - timedelta(seconds=ALIVE_S)
    try:
        with context.database.read() as connection:
            return Stored(
                jobs=storage.jobs_by_kind_and_state(connection),
                agents_alive=storage.agents_alive(connection, alive_since),
            )
    except PipeplanError:
        return None
