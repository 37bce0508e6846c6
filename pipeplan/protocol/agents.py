"""Agents: what a node's agent reports of itself, and how lists show it."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from pipeplan.protocol.jobs import NO_NULL, AgentName, Instance
from pipeplan.protocol.listing import ListQuery, WireModel

AgentState = Literal["alive", "lost", "draining"]
"""`lost`: not heard of for as long as a lease lasts. `draining`: it is about to end, and takes no more jobs."""

Text = Annotated[str, Field(max_length=500, pattern=NO_NULL)]


class Registration(WireModel):
    """A node and its agent. `instance` names the process: a new one takes the name over from an older one."""

    name: AgentName
    instance: Instance
    host: Text
    address: Text = Field(description="where the other nodes of a run reach it")
    port: int = Field(ge=1, le=65535, description="free on this node: the rendezvous of runs that it leads")
    devices: int = Field(ge=1, le=1024, description="GPUs; without any, processor cores")
    max_processes: int | None = Field(
        default=None, ge=1, le=4096, description="how many ranks it takes at once; null: as many as it has devices"
    )
    device_name: Text
    memory_bytes: int = Field(ge=0, le=2**63 - 1, description="of a GPU; without any, of the node")
    torch_version: Text
    driver: Text | None = None
    version: Text = Field(description="of pipeplan")
    allow: tuple[Text, ...] = Field(default=(), max_length=1000, description="the factories that jobs may name")
    shared_folder: Text | None = Field(
        default=None, description="names the folder that it shares with other agents; runs over several nodes need one"
    )


class Presence(WireModel):
    """An agent's sign of life."""

    instance: Instance
    draining: bool = False


class Agent(WireModel):
    """An agent as everybody sees it."""

    id: str
    name: str
    state: AgentState
    host: str
    address: str
    port: int
    devices: int
    max_processes: int
    device_name: str
    memory_bytes: int
    torch_version: str
    driver: str | None
    version: str
    allow: tuple[str, ...]
    shared_folder: str | None
    job_id: str | None = Field(default=None, description="the job that it was given last, while it has it")
    unreadable: str | None = Field(
        default=None, description="why this release cannot read what it told another one; null: it can"
    )
    registered_at: datetime
    last_seen_at: datetime


class AgentQuery(ListQuery):
    """Which agents, and in which order: a minus reverses it. Default: newest first."""

    sort: Literal["created_at", "-created_at", "last_seen_at", "-last_seen_at"] | None = None
