"""The dashboard's routes: what is asked of the services, and the template that shows it."""

from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from planner_service.api.auth import scope
from planner_service.api.bodies import Services
from planner_service.contract.problems import Problem
from planner_service.dashboard import formats
from planner_service.dashboard.plan_page import plan_view
from planner_service.dashboard.run_page import run_view
from planner_service.services import jobs, plans, runs
from planner_service.storage.listing import Cut

FOLDER = Path(__file__).parent
LISTED = Cut(limit=25)
POLICY = "default-src 'none'; style-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
"""Nothing but our own style sheet is loaded and no script runs, whatever a document's names hold."""

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[scope("read")])
templates = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
templates.filters.update(formats.FILTERS)


def install(app: FastAPI) -> None:
    """Adds the pages to the application."""
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")


@router.get("/")
def index(services: Services, request: Request) -> HTMLResponse:
    """Plans, runs, and the jobs that are under way."""
    return _page(
        "index.html",
        url=str(request.base_url).rstrip("/"),
        plans=plans.newest(services, LISTED),
        runs=runs.newest(services, LISTED),
        jobs=jobs.newest(services, LISTED, ("queued", "leased")),
    )


@router.get("/plans/{plan_id}")
def plan(services: Services, plan_id: str) -> HTMLResponse:
    """One plan."""
    return _page("plan.html", view=plan_view(services, plan_id))


@router.get("/runs/{run_id}")
def run(services: Services, run_id: str) -> HTMLResponse:
    """One run."""
    return _page("run.html", view=run_view(services, run_id))


def problem_page(_request: Request, problem: Problem) -> HTMLResponse:
    """A problem, for a person."""
    return _page("problem.html", status=problem.status, problem=problem)


def _page(template: str, *, status: int = 200, **content: object) -> HTMLResponse:
    text = templates.get_template(template).render(**content)
    return HTMLResponse(text, status, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})
