"""The agents: who is there, with what, and what each is at."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner_service.api.bodies import Services
from planner_service.contract.agents import AgentQuery
from planner_service.dashboard.queries import query_of
from planner_service.dashboard.rendering import page
from planner_service.services import agents

router = APIRouter()


@router.get("/agents")
def list_agents(services: Services, request: Request) -> HTMLResponse:
    """A page of the agents, those that registered last first."""
    return page(request, "agents.html", agents=agents.page(services, query_of(AgentQuery, request)))
