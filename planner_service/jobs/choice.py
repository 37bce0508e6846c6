"""Choice: which jobs of the queue an agent may take. This module only reads; `leases` takes one of the jobs in a short
write.

An agent gets the oldest job that it can do. In a queue with more than NEEDS needs, it gets the oldest of those that a
look reads (`look`). Every step skips jobs that only another release can read. An agent that could take part in a
waiting job for several nodes takes no later job.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Literal

from sqlalchemy import Connection

from pipeplan.protocol.jobs import LeaseRequest
from planner_service.agents import service as agents
from planner_service.agents import store as known_agents
from planner_service.agents.needs import Needs, read
from planner_service.agents.store import KnownAgent
from planner_service.jobs import queue
from planner_service.jobs.queue import QueuedJob
from planner_service.jobs.store import is_readable
from planner_service.platform.context import Context

JOBS = 50
NEEDS = 200
SUITABLE = 20
MAX_AGENTS = 10_000
READ_AT_ONCE = 16
"""How many tasks are read at once, to pass over those that only another release can read."""

REFUSED_AT_ONCE = 20

needs_of = lru_cache(50 * NEEDS)(read)
"""The needs of a text. It is cached: every look reads the same texts."""

Verdict = Literal["takes", "waits", "cannot"]
"""The agent may take the job; could take part in it once others are free; cannot do it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Places in the queue that the agent may take, the oldest first; with `gang`, the last is a job of several nodes.

    `refused` are needs that no agent allows. `asks`: whether to record that the agent asks for work.
    """

    places: tuple[int, ...]
    gang: Needs | None
    refused: tuple[tuple[str, Needs], ...]
    asks: bool

    @property
    def empty(self) -> bool:
        return not (self.places or self.refused or self.asks)


class Cursors:
    """Where the next look at a long queue continues, by agent."""

    def __init__(self) -> None:
        self._after: dict[str, str] = {}

    def of(self, agent: str) -> str:
        """The id of the needs after which the next look begins."""
        return self._after.get(agent, "")

    def keep(self, agent: str, after: str) -> None:
        """Keeps where the next look begins; "" is the beginning."""
        self._after.pop(agent, None)
        if after:
            if len(self._after) >= MAX_AGENTS:
                self._after.clear()
            self._after[agent] = after


CURSORS = Cursors()


def look(context: Context, connection: Connection, request: LeaseRequest, now: datetime) -> Chosen:
    """The jobs that the agent may take now. The cost does not grow with the queue."""
    judge = _Judge(context, connection, request, now)
    # 1. The oldest jobs: usually one of them suits.
    oldest = queue.waiting(connection, request.kinds, now, JOBS)
    if not judge.decided_by(oldest) and len(oldest) == JOBS:
        # 2. The oldest job of each need, from where the last look ended: an index steps from need to need.
        seen = queue.needs_waiting(connection, CURSORS.of(request.agent), NEEDS)
        if not judge.decided_by(judge.first_of(seen)):
            CURSORS.keep(request.agent, seen[-1][0] if len(seen) == NEEDS else "")
    return judge.choice()


@dataclass(slots=True)
class _Judge:
    """Goes through the queue for one agent. Every need is judged once, and the other agents' state is read once."""

    context: Context
    connection: Connection
    request: LeaseRequest
    now: datetime
    agent: KnownAgent | None = field(init=False)
    _verdicts: dict[str, Verdict] = field(init=False, default_factory=dict)
    _others: dict[str, list[KnownAgent]] = field(init=False, default_factory=dict)
    _places: list[int] = field(init=False, default_factory=list)
    _gang: Needs | None = field(init=False, default=None)
    _refused: dict[str, Needs] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.agent = None
        if self.request.instance is not None:
            self.agent = known_agents.named(self.connection, self.request.agent)
        if self.agent is not None:
            agents.require_readable(self.agent)

    def decided_by(self, waiting: Sequence[QueuedJob]) -> bool:
        """Goes through jobs, the oldest first; whether the agent may take one, or has to wait for one."""
        for start in range(0, len(waiting), READ_AT_ONCE):
            some = waiting[start : start + READ_AT_ONCE]
            for one in self._readable([one for one in some if self._verdict(one.needs_id, one.needs) != "cannot"]):
                if self._verdict(one.needs_id, one.needs) == "waits":
                    return True
                self._places.append(one.place)
                needs = needs_of(one.needs)
                if needs is not None and needs.nodes > 1:
                    self._gang = needs
                    return True
            if self._places:
                return True
        return False

    def first_of(self, waiting: Iterable[tuple[str, str]]) -> list[QueuedJob]:
        """The oldest job for each of these needs, ids and texts, that the agent meets; the oldest first."""
        found: list[QueuedJob] = []
        for needs_id, text in waiting:
            if self._verdict(needs_id, text) == "cannot":
                continue
            found += self._oldest_of(needs_id)
            if len(found) == SUITABLE:
                break
        return sorted(found, key=lambda one: one.place)

    def _oldest_of(self, needs_id: str) -> list[QueuedJob]:
        """The oldest job that needs this and that this release can read, if there is one."""
        after, limit = 0, 1
        while True:
            oldest = queue.of_needs(self.connection, self.request.kinds, self.now, needs_id, after, limit)
            readable = self._readable(oldest)
            if readable or not oldest:
                return readable[:1]
            after, limit = oldest[-1].place, JOBS

    def _readable(self, waiting: Sequence[QueuedJob]) -> list[QueuedJob]:
        """Those of the jobs that this release can read."""
        texts = queue.tasks(self.connection, [one.place for one in waiting]) if waiting else {}
        return [one for one in waiting if one.place in texts and is_readable(texts[one.place])]

    def choice(self) -> Chosen:
        """The candidates."""
        registered = self.request.instance is not None
        asks = registered and (
            self.agent is None
            or self.agent.told.instance != self.request.instance
            or not agents.is_fresh(self.context, self.agent, self.now)
        )
        refused = tuple(self._refused.items())
        return Chosen(places=tuple(self._places), gang=self._gang, refused=refused, asks=asks)

    def _verdict(self, needs_id: str, text: str) -> Verdict:
        """Whether the agent meets these needs; judged once. It never meets those that only another release can read."""
        if needs_id not in self._verdicts:
            needs = needs_of(text)
            self._verdicts[needs_id] = "cannot" if needs is None else self._judged(needs_id, needs)
        return self._verdicts[needs_id]

    def _judged(self, needs_id: str, needs: Needs) -> Verdict:
        agent = self.agent
        if agent is None:  # It never reported its capabilities: it takes jobs for one node that name no other agents.
            named = not needs.agents or self.request.agent in needs.agents
            return "takes" if needs.nodes == 1 and named and self.request.instance is None else "cannot"
        if needs.lacks(agent) is not None:
            full = len(self._refused) == REFUSED_AT_ONCE
            returning = self.context.absence.lasts(self.now)  # no agent could report while the service was away
            if not full and not returning and needs.refused(agent) is not None and nobody_allows(needs, self._heard()):
                self._refused[needs_id] = needs
            return "cannot"
        if needs.nodes == 1:
            return "takes"
        since = self.now - timedelta(seconds=self.context.lease_s / 3)
        if "idle" not in self._others:
            self._others["idle"] = known_agents.idle(self.connection, since, lock=False)
            self._others["alive"] = agents.alive(self.context, self.connection, self.now)
        if 1 + len(needs.others(agent, self._others["idle"])) >= needs.nodes:
            return "takes"
        return "waits" if 1 + len(needs.others(agent, self._others["alive"])) >= needs.nodes else "cannot"

    def _heard(self) -> list[KnownAgent]:
        if "heard" not in self._others:
            self._others["heard"] = heard_lately(self.connection, self.now)
        return self._others["heard"]


def heard_lately(connection: Connection, now: datetime) -> list[KnownAgent]:
    return known_agents.heard_since(connection, now - timedelta(days=1))


def nobody_allows(needs: Needs, heard: Iterable[KnownAgent]) -> bool:
    return all(needs.refused(agent) is not None for agent in heard)
