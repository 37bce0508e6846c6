"""Metrics that live in the database, and those that the database's connections are asked for."""

from datetime import timedelta

from sqlalchemy import QueuePool, event
from sqlalchemy.engine import ExceptionContext

from pipeplan.errors import PipeplanError
from planner_service.metrics import Stored
from planner_service.services.context import Context
from planner_service.storage import metrics as storage

ALIVE_S = 90.0
"""An agent that was heard of within so many seconds is alive."""


def watch(context: Context) -> None:
    """Connects the context's metrics to its database."""
    metrics, engine = context.metrics, context.database.engine

    def failed(error: ExceptionContext) -> None:
        metrics.count_database_error(type(error.sqlalchemy_exception or error.original_exception).__name__)

    event.listen(engine, "handle_error", failed)
    pool = engine.pool
    if isinstance(pool, QueuePool):
        metrics.watch_pool(lambda: float(pool.checkedout()))
    metrics.watch_stored(lambda: stored(context))


def stored(context: Context) -> Stored | None:
    """What the database tells of now; None where it cannot be read."""
    alive_since = context.now() - timedelta(seconds=ALIVE_S)
    try:
        with context.database.read() as connection:
            return Stored(
                jobs=storage.jobs_by_kind_and_state(connection),
                agents_alive=storage.agents_alive(connection, alive_since),
            )
    except PipeplanError:
        return None
