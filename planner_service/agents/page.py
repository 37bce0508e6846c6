"""The agents: their state, their devices and their jobs."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeplan.protocol.agents import AgentQuery
from planner_service.agents import service as agents
from planner_service.platform.pages import page, query_of
from planner_service.platform.requests import Services

router = APIRouter()


@router.get("/agents")
def list_agents(services: Services, request: Request) -> HTMLResponse:
    """A page of the agents, those that registered last first."""
    return page(request, "agents/agents.html", agents=agents.page(services, query_of(AgentQuery, request)))
