"""Needs: a job's requirements of agents, and the agents that meet them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from pipeplan.documents.identity import canonical_json, content_id
from pipeplan.documents.names import STRICT
from pipeplan.protocol.jobs import Task, allows, factory_of, specs_of
from planner_service.agents.store import KnownAgent

NO_NEEDS = ("any", "{}")
"""The id and the text of the needs of a job that any agent can take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """How many nodes, with how many processes each; which agents, if any are named; which factories must be allowed."""

    nodes: int = 1
    processes: int = 1
    agents: tuple[str, ...] = ()
    factories: tuple[str, ...] = ()
    shared_folder: bool = False

    __pydantic_config__: ClassVar = STRICT

    def lacks(self, agent: KnownAgent) -> str | None:
        """The need that the agent does not meet; None if it can take part."""
        told = agent.told
        if agent.unreadable is not None:
            return "registered with another release"
        if self.agents and agent.name not in self.agents:
            return "is not named"
        if self.processes > most_processes(agent):
            return f"takes {most_processes(agent)} processes at once, {self.processes} are needed"
        if self.shared_folder and told.shared_folder is None:
            return "shares no folder with others (pipeplan-agent start --shared-dir)"
        refused = self.refused(agent)
        return None if refused is None else f"does not allow {refused}"

    def refused(self, agent: KnownAgent) -> str | None:
        """The first of the factories that the agent's operator does not allow; None where this is not known."""
        if agent.unreadable is not None:
            return None
        return next((name for name in self.factories if not allows(agent.told.allow, name)), None)

    def others(self, agent: KnownAgent, among: Sequence[KnownAgent]) -> list[KnownAgent]:
        """The others that can take part together with the agent."""
        return [
            other
            for other in among
            if other.name != agent.name
            and self.lacks(other) is None
            and not (self.shared_folder and other.told.shared_folder != agent.told.shared_folder)
        ]


def most_processes(agent: KnownAgent) -> int:
    return agent.told.max_processes or agent.told.devices


def factories_of(task: Task) -> tuple[str, ...]:
    return tuple(sorted({factory_of(spec) for _, spec in specs_of(task)}))


def stored(needs: Needs) -> tuple[str, str]:
    """The needs' id and text; those of a job that asks for nothing are `NO_NEEDS`."""
    return NO_NEEDS if needs == Needs() else (content_id(needs), canonical_json(needs))


def read(text: str) -> Needs | None:
    """The needs that `stored` wrote; None for those that only another release understands."""
    try:
        return _STORED.validate_json(text)
    except ValidationError:
        return None


_STORED = TypeAdapter(Needs)


def why_waiting(needs: Needs, alive: Sequence[KnownAgent]) -> str:
    """A sentence that says why no agent takes a job in the queue."""
    if not alive:
        return "no agent is alive"
    able = [agent for agent in alive if needs.lacks(agent) is None]
    enough = any(1 + len(needs.others(agent, able)) >= needs.nodes for agent in able)
    if enough and needs.nodes == 1:
        return "the agents that can do it are busy"
    if enough:
        return f"{needs.nodes} agents that can do it together are not free at once"
    if able:
        return f"{needs.nodes} agents are needed at once; {len(able)} that can take part are alive"
    reasons = "; ".join(f"{agent.name} {needs.lacks(agent)}" for agent in alive[:5])
    return f"none of the {len(alive)} agents that are alive can do it: {reasons}"
