"""Dashboard: the pages that the application shows to people. Every page asks for the scope `read`."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

from pipeplan.protocol.problems import Problem
from planner_service.access.auth import scope
from planner_service.agents import page as agents
from planner_service.aliases import page as aliases
from planner_service.audit import page as audit
from planner_service.documents import page as documents
from planner_service.jobs import page as jobs
from planner_service.overview import page as overview
from planner_service.overview import plan_page as plan
from planner_service.plans import form_page as form
from planner_service.plans import page as plans
from planner_service.platform.pages import FOLDER, page
from planner_service.runs import page as runs

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[scope("read")])
for view in (overview, plans, form, plan, documents, runs, jobs, agents, aliases, audit):
    router.include_router(view.router)

static = StaticFiles(directory=FOLDER / "static")


def login_page(request: Request, way_back: str, failed: str | None) -> HTMLResponse:
    """Where a person enters a token. `way_back` is the page to show then, `failed` why the last try failed."""
    return page(request, "platform/login.html", way_back=way_back, failed=failed)


def problem_page(request: Request, problem: Problem) -> HTMLResponse:
    return page(request, "platform/problem.html", status=problem.status, problem=problem)
