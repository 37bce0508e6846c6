"""Metrics that live in the database, and those that the database's connections are asked for.

Retention: what is old goes, what is pinned stays, and what went is said.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta

from sqlalchemy import Connection, QueuePool, event
from sqlalchemy.engine import ExceptionContext

from pipeplan.errors import ConflictError, PipeplanError, UnavailableError, require
from planner_service.overview import store as storage
from planner_service.overview.store import REMOVERS, Remove
from planner_service.platform.context import Context
from planner_service.platform.metrics import Stored

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


ROWS = 500
"""Rows of a transaction: the service's own writers wait for no more."""

ATTEMPTS = 20
YEAR_S = 365 * 86_400
MAX_AGE_S = 1000 * YEAR_S

Begin = Callable[[], AbstractContextManager[Connection]]


def prune(context: Context, older_than_s: float, *, dry_run: bool = False) -> dict[str, int]:
    """Removes what is older and not pinned; says how much of each. With `dry_run` all of it is taken back at the end.

    Pinned is a plan with a run that is kept, or at which an alias has pointed since then; a profile or cluster that a
    kept plan was made from, that a kept job gave, or that a job will plan with. The history of aliases and the tokens
    are never removed.
    """
    require(0 < older_than_s <= MAX_AGE_S, "older_than", "must be above 0 s and at most 1000 years", older_than_s)
    before = context.now() - timedelta(seconds=older_than_s)
    if not dry_run:
        return {name: _all(context.database.write, remove, before) for name, remove in REMOVERS.items()}
    with context.database.write() as connection:
        counts = {name: _all(lambda: nullcontext(connection), remove, before) for name, remove in REMOVERS.items()}
        connection.rollback()
    return counts


def _all(begin: Begin, remove: Remove, before: datetime) -> int:
    total = 0
    while removed := _some(begin, remove, before):
        total += removed
    return total


def _some(begin: Begin, remove: Remove, before: datetime) -> int:
    """One transaction's worth. What is used again between the look and the removal is looked at anew."""
    for _ in range(ATTEMPTS):
        try:
            with begin() as connection:
                return remove(connection, before, ROWS)
        except ConflictError:
            continue
    raise UnavailableError("what is to be removed is used again all the time; try again when less is going on")
