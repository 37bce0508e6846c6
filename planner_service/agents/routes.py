"""Routes of the agents: agents register and report; every caller may read."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from pipeplan.protocol.agents import Agent, AgentQuery, Presence, Registration
from pipeplan.protocol.listing import Page
from planner_service.access.auth import Caller, scope
from planner_service.agents import service as agents
from planner_service.platform.requests import MEBIBYTE, SMALL, Services, document, mark_created, takes
from planner_service.platform.writers import WritingRoute

router = APIRouter(prefix="/v1/agents", tags=["agents"], route_class=WritingRoute)


@router.post(
    "",
    dependencies=[scope("agent"), takes(MEBIBYTE)],
    status_code=201,
    responses={200: {"model": Agent, "description": "An agent of this name was registered before"}},
)
def register_agent(
    services: Services,
    caller: Caller,
    told: Annotated[Registration, Depends(document(Registration))],
    response: Response,
) -> Agent:
    """Registers an agent under its name. May be repeated. Another `instance` takes the name over, under the same token
    or after that token has ended.
    """
    agent, new = agents.register(services, told, by=caller)
    mark_created(response, new, f"/v1/agents/{agent.id}")
    return agent


@router.get("", dependencies=[scope("read")])
def list_agents(services: Services, query: Annotated[AgentQuery, Query()]) -> Page[Agent]:
    """The agents: newest first, or in the requested order."""
    return agents.page(services, query)


@router.get("/{agent_id}", dependencies=[scope("read", "agent")])
def get_agent(services: Services, agent_id: str) -> Agent:
    """An agent, by its id or its name."""
    return agents.get(services, agent_id)


@router.post("/{agent_id}/heartbeat", dependencies=[scope("agent"), takes(SMALL)])
def heartbeat_agent(
    services: Services, caller: Caller, agent_id: str, presence: Annotated[Presence, Depends(document(Presence))]
) -> Agent:
    """Records that the agent is alive, and whether it drains. The path holds its id or its name."""
    return agents.present(services, agent_id, presence, by=caller)
