"""The dashboard's pages: what is added to the application. Every page asks for the scope `read`."""

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

from planner_service.api.auth import scope
from planner_service.contract.problems import Problem
from planner_service.dashboard.rendering import FOLDER, page
from planner_service.dashboard.views import (
    agents,
    alias,
    aliases,
    cluster,
    clusters,
    compare,
    job,
    jobs,
    overview,
    plan,
    plans,
    profile,
    profiles,
    run,
    runs,
)

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[scope("read")])
for view in (
    overview,
    plans,
    compare,
    plan,
    profiles,
    profile,
    clusters,
    cluster,
    runs,
    run,
    jobs,
    job,
    agents,
    aliases,
    alias,
):
    router.include_router(view.router)


def install(app: FastAPI) -> None:
    """Adds the pages to the application."""
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")


def login_page(request: Request, way_back: str, failed: str | None) -> HTMLResponse:
    """Where a token is entered; `way_back` is where it leads to, `failed` why the last try did not."""
    return page(request, "login.html", way_back=way_back, failed=failed)


def problem_page(request: Request, problem: Problem) -> HTMLResponse:
    """A problem, for a person."""
    return page(request, "problem.html", status=problem.status, problem=problem)
