"""Audit: who did what to the service's database, and what was refused to whom."""

from datetime import datetime
from typing import Literal, get_args

from pydantic import Field

from pipeplan.protocol.listing import ListQuery, Name, WireModel

Action = Literal[
    "profile.store",
    "cluster.store",
    "plan.store",
    "alias.put",
    "alias.delete",
    "job.enqueue",
    "job.lease",
    "job.renew",
    "job.complete",
    "job.fail",
    "job.release",
    "job.retry",
    "job.cancel",
    "agent.register",
    "agent.present",
    "token.create",
    "token.revoke",
    "session.open",
    "session.end",
    "database.upgrade",
    "database.downgrade",
    "database.prune",
    "database.restore",
]
"""The actions. Of `job.renew` and `agent.present`, an agent's signs of life, only refusals and the start of draining
are kept.
"""

ACTIONS: tuple[Action, ...] = get_args(Action)

Outcome = Literal["done", "begun", "refused", "failed"]
"""`begun` is a command that works in several transactions; `failed` is the service's own failure."""

Via = Literal["api", "dashboard", "command"]


class AuditEntry(WireModel):
    """One act, or one attempt."""

    sequence: int = Field(description="its place in the log")
    created_at: datetime
    action: str = Field(description="one of the actions by which entries can be filtered, or another release's")
    outcome: str = Field(description="`done`, `begun`, `refused` or `failed`, or another release's")
    object_id: str | None = Field(description="the id, or the name, of what it was done to")
    actor: str = Field(description="the token's name; `local`, `nobody` or `console` where there was none")
    token_id: str | None
    agent: str | None = Field(description="the agent in whose name it was done")
    via: str = Field(description="`api`, `dashboard` or `command`, or another release's")
    status: int | None = Field(description="the answer's status, of what was refused or failed")
    detail: str | None
    request_id: str | None = Field(description="the request's X-Request-ID, as in the log")


class AuditQuery(ListQuery):
    """Which entries, and in which order: a minus reverses it. Default: newest first."""

    sort: Literal["created_at", "-created_at"] | None = None
    action: Action | None = None
    outcome: Outcome | None = None
    actor: Name | None = Field(default=None, description="the token's name")
    token_id: Name | None = None
    agent: Name | None = None
    object_id: Name | None = None
