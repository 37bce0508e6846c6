"""The application: wires settings, database, planners, routes and pages together. Nothing else does."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from importlib.metadata import version

from fastapi import APIRouter, FastAPI

from planner_service import dashboard as pages
from planner_service.access import routes as access
from planner_service.access import service as stored_tokens
from planner_service.access.auth import Admission, Door, Identities, require_scopes
from planner_service.access.middleware import Access, Guard
from planner_service.agents import routes as agents
from planner_service.aliases import routes as aliases
from planner_service.audit import routes as audit
from planner_service.audit.middleware import Audited, places
from planner_service.documents import routes as documents
from planner_service.documents.caching import Express, Head
from planner_service.events import routes as events
from planner_service.jobs import routes as jobs
from planner_service.jobs.beats import Beats
from planner_service.jobs.kinds import register
from planner_service.jobs.measurements import LINKS, PROFILE
from planner_service.overview import openapi
from planner_service.overview import routes as overview
from planner_service.overview import service as stored_metrics
from planner_service.overview.addresses import Names
from planner_service.plans import chart_routes
from planner_service.plans import routes as plans
from planner_service.plans.background import Background, WorkBounds
from planner_service.plans.estimates import ESTIMATE
from planner_service.plans.jobs import PLAN
from planner_service.plans.prices import price_process
from planner_service.plans.solver import FunctionSolver, solve_here, solver_process
from planner_service.platform import problems
from planner_service.platform.base_path import BasePath
from planner_service.platform.context import Context, Solve, utc_now
from planner_service.platform.database import Database
from planner_service.platform.middleware import Rates, RequestLimits, SecurityHeaders
from planner_service.platform.migrations import upgrade
from planner_service.platform.parsing import Parsing, ParsingLimits
from planner_service.platform.requests import KnownParameters, require_sizes
from planner_service.platform.rules import parse_rules
from planner_service.platform.settings import Settings
from planner_service.runs import routes as runs
from planner_service.runs.jobs import RUN
from planner_service.upkeep.background import Upkeep
from planner_service.upkeep.backups import BackupPlan

register(PROFILE, LINKS, ESTIMATE, PLAN, RUN)

ROUTES = APIRouter(generate_unique_id_function=lambda route: route.name)  # of the API's operations, in its description
"""The routes of all applications of a process. Applications share them, because their parsers take long to build.
"""

for router in (
    documents.profile_router,
    documents.cluster_router,
    plans.router,
    chart_routes.router,
    aliases.router,
    jobs.router,
    events.router,
    runs.router,
    agents.router,
    access.router,
    audit.router,
    overview.router,
    overview.metrics_router,
    overview.ids_router,
    overview.charts_router,
):
    ROUTES.include_router(router, dependencies=[KnownParameters])  # no route of the API takes a parameter unknown to it
for router in (access.login_router, pages.router, openapi.router):
    ROUTES.include_router(router)
ROUTES.mount("/static", pages.static, name="static")

DESCRIPTION = (
    "Profiles, clusters, plans, jobs and runs. Documents are stored by content: the same content has the same id. "
    "Errors are problem details (RFC 9457); wrong input, malformed JSON among it, is a 422 that names field, rule "
    "and value. Lists come newest first, a page at a time."
)


def create_app(settings: Settings, *, now: Callable[[], datetime] = utc_now, solve: Solve | None = None) -> FastAPI:
    """The application; on start-up it brings its database to the present tables.

    Solver processes make the plans; if `solve` is given, it makes them in this process.
    """
    context = _context(settings, now, solve)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        try:
            prepare(settings, context)
            context.absence.back(now(), settings.lease_s)  # only now: bringing the tables up to date may take minutes
            async with app.state.background.running(), upkeep.running():
                yield
        finally:
            context.database.close()

    app = FastAPI(
        title="pipeplan",
        version=version("pipeplan"),
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=ROUTES.routes,
    )
    app.state.max_body_bytes = settings.max_body_bytes
    app.state.context = context

    start = partial(solver_process, settings.solver_memory_bytes) if solve is None else partial(FunctionSolver, solve)
    bounds = WorkBounds(
        solvers=settings.solver_processes,
        queue=settings.solver_queue,
        streams=settings.event_streams,
        deadline_s=settings.solve_deadline_s,
        price_instructions=settings.price_instructions,
    )
    pricing = partial(price_process, settings.solver_memory_bytes)
    app.state.background = Background(context, start, bounds, pricing)
    upkeep = _upkeep(settings, context)
    app.state.feed = app.state.background.feed

    app.add_middleware(Beats, context=context)
    problems.install(app, pages.problem_page)
    openapi.install(app)
    stored_metrics.watch(context)
    _add_middleware(app, settings)
    require_scopes(app)
    require_sizes(app)
    return app


def prepare(settings: Settings, context: Context) -> None:
    """Brings the database to the present tables. Raises PipeplanError if no caller could be admitted.

    A database that cannot be served is closed.
    """
    try:
        upgrade(context.database)
        if settings.demands_tokens:
            stored_tokens.require_any_valid(context, settings.host)
    except BaseException:
        context.database.close()
        raise


def _context(settings: Settings, now: Callable[[], datetime], solve: Solve | None) -> Context:
    """The common objects of routes and services: the database, the limits and the readers of large documents."""
    database = Database(
        settings.database_url, pool_size=settings.database_pool_size, pool_timeout_s=settings.database_pool_timeout_s
    )
    return Context(
        database=database,
        solve=solve or solve_here,
        now=now,
        lease_s=settings.lease_s,
        max_attempts=settings.max_attempts,
        token_key=settings.token_key,
        longest_search_s=settings.plan_job_deadline_s,
        parsing=Parsing(
            ParsingLimits(
                parsers=settings.parser_processes,
                queue=settings.parser_queue,
                memory_bytes=settings.parser_memory_bytes,
                cpu_s=settings.parser_cpu_s,
            )
        ),
    )


def _upkeep(settings: Settings, context: Context) -> Upkeep:
    """The service's scheduled tasks, by the settings."""
    folder = settings.backup_folder
    return Upkeep(
        context,
        rules=parse_rules(settings.retention),
        every_s=settings.retention_interval_s,
        backing_up=None
        if folder is None
        else BackupPlan(folder=folder, every_s=settings.backup_interval_s, kept=settings.backups_kept),
    )


def _add_middleware(app: FastAPI, settings: Settings) -> None:
    """Adds the layers before a request's route, from the innermost out: a request meets the last one added first."""
    app.add_middleware(
        Express,
        context=app.state.context,
        lanes=[documents.PROFILE, documents.CLUSTER, plans.DOCUMENT],
        lists=[plans.LIST],
    )
    app.add_middleware(Names, context=app.state.context)
    app.add_middleware(Head)
    per_s, failures = settings.requests_per_s, settings.failed_tokens_per_min
    app.state.admission = Admission(
        identities=Identities(app.state.context),
        demanded=settings.demands_tokens,
        requests=Rates(per_s, max(1.0, per_s)) if per_s else None,
        failures=Rates(failures / 60, max(1.0, failures)),
        login_page=pages.login_page,
    )
    app.add_middleware(Door, admission=app.state.admission)
    app.add_middleware(Audited, context=app.state.context, places=places(app))
    app.add_middleware(RequestLimits, body_timeout_s=settings.body_timeout_s)
    app.add_middleware(Guard, hosts=settings.hosts, tokens=settings.demands_tokens)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Access, metrics=app.state.context.metrics)
    app.add_middleware(BasePath, base=settings.base_path)
