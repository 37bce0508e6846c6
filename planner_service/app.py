"""The application: wires settings, database, planners, routes and pages together. Nothing else does."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from importlib.metadata import version

from fastapi import FastAPI

from planner_service.api import clusters, health, jobs, metrics, openapi, plans, problems, profiles, runs
from planner_service.api.access import Access
from planner_service.api.guard import Guard
from planner_service.dashboard import pages
from planner_service.services import metrics as stored_metrics
from planner_service.services.context import Context, Solve, utc_now
from planner_service.settings import Settings
from planner_service.solvers.solve import solve as solve_with_planner
from planner_service.storage.database import Database
from planner_service.storage.migrations import upgrade

DESCRIPTION = (
    "Profiles, clusters, plans, jobs and runs. Documents are stored by content: the same content has the same id. "
    "Errors are problem details (RFC 9457); wrong input, malformed JSON among it, is a 422 that names field, rule "
    "and value. Lists come newest first, a page at a time."
)


def create_app(
    settings: Settings, *, now: Callable[[], datetime] = utc_now, solve: Solve = solve_with_planner
) -> FastAPI:
    """The application; on start-up it brings its database to the present tables."""
    database = Database(
        settings.database_url,
        pool_size=settings.database_pool_size,
        pool_timeout_s=settings.database_pool_timeout_s,
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        upgrade(database)
        yield
        database.close()

    app = FastAPI(
        title="pipeplan",
        version=version("pipeplan"),
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.max_body_bytes = settings.max_body_bytes
    app.state.context = Context(
        database=database,
        solve=solve,
        now=now,
        lease_s=settings.lease_s,
        max_attempts=settings.max_attempts,
    )
    for routes in (profiles, clusters, plans, jobs, runs, health, metrics):
        app.include_router(routes.router)
    pages.install(app)
    problems.install(app, pages.problem_page)
    openapi.install(app)
    app.add_middleware(Guard)
    stored_metrics.watch(app.state.context)
    app.add_middleware(Access, metrics=app.state.context.metrics)
    return app
