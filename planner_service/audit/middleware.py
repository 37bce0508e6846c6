"""Middleware of the audit log: it says who acts, for all writes below it, and records the attempts without effect.

An attempt is a request that would change something on an existing route. A refused attempt is in the log before the
answer is sent. Strangers could fill the log with attempts; the number that is kept of one caller in a second is
therefore limited.
"""

import logging
import re
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.errors import PipeplanError
from pipeplan.protocol.audit import Action
from pipeplan.protocol.tokens import NOBODY, Identity
from planner_service.audit import service as audit
from planner_service.platform.context import Context
from planner_service.platform.middleware import Rates, caller_address
from planner_service.platform.problems import API_PREFIX
from planner_service.platform.requests import KEY
from planner_service.platform.trail import ATTEMPT, Attempt
from planner_service.platform.writers import SAFE, in_writer

REFUSALS_PER_S = 1.0
REFUSALS_AT_ONCE = 60.0
"""How many attempts without effect are kept of one caller."""

LOG = logging.getLogger("pipeplan.audit")

ROUTES: dict[tuple[str, str], Action] = {
    ("POST", "/v1/profiles"): "profile.store",
    ("POST", "/v1/clusters"): "cluster.store",
    ("POST", "/v1/plans"): "plan.store",
    ("PUT", "/v1/aliases/{name:path}"): "alias.put",
    ("DELETE", "/v1/aliases/{name:path}"): "alias.delete",
    ("POST", "/v1/jobs"): "job.enqueue",
    ("POST", "/v1/jobs/lease"): "job.lease",
    ("POST", "/v1/jobs/{job_id}/heartbeat"): "job.renew",
    ("POST", "/v1/jobs/{job_id}/complete"): "job.complete",
    ("POST", "/v1/jobs/{job_id}/fail"): "job.fail",
    ("POST", "/v1/jobs/{job_id}/release"): "job.release",
    ("POST", "/v1/jobs/{job_id}/retry"): "job.retry",
    ("POST", "/v1/jobs/{job_id}/cancel"): "job.cancel",
    ("POST", "/v1/agents"): "agent.register",
    ("POST", "/v1/agents/{agent_id}/heartbeat"): "agent.present",
    ("POST", "/v1/tokens"): "token.create",
    ("POST", "/v1/tokens/{token_id}/revoke"): "token.revoke",
    ("POST", "/login"): "session.open",
    ("POST", "/logout"): "session.end",
    ("POST", "/plans/new"): "plan.store",
    ("POST", "/runs/calibrate"): "plan.store",
    ("POST", "/example"): "plan.store",
    ("POST", "/jobs/{job_id}/cancel"): "job.cancel",
    ("POST", "/jobs/{job_id}/retry"): "job.retry",
}
"""The action of each route that changes something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingPlace:
    """A route that changes something."""

    method: str
    path: re.Pattern[str]
    action: Action


def places(app: FastAPI) -> tuple[WritingPlace, ...]:
    """The application's routes that change something. Raises PipeplanError for one without an action."""
    found = []
    for route in iter_route_contexts(app.routes):
        for method in sorted(set(route.methods or ()) - SAFE):
            action = ROUTES.get((method, route.path or ""))
            if action is None:
                raise PipeplanError(f"the route {method} {route.path} does not declare its action")
            found.append(WritingPlace(method=method, path=route.path_regex, action=action))
    return tuple(found)


class Audited:
    """Runs before the door: a request that the door refuses is an attempt, too."""

    def __init__(self, app: ASGIApp, context: Context, places: tuple[WritingPlace, ...]) -> None:
        self._app = app
        self._context = context
        self._places = places
        self._refusals = Rates(REFUSALS_PER_S, REFUSALS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE:
            await self._app(scope, receive, send)
            return
        by_api = scope["path"].startswith(f"{API_PREFIX}/")
        ATTEMPT.set(Attempt(actor=NOBODY.name, via="api" if by_api else "dashboard"))
        failed = 0

        async def watched(message: Message) -> None:
            nonlocal failed
            if message["type"] == "http.response.start" and message["status"] >= 400:
                if message["status"] < 500:
                    await self._note(scope, message["status"])
                else:
                    failed = message["status"]
            await send(message)

        await self._app(scope, receive, watched)
        if failed:  # the database may have failed: the request does not wait for this entry
            await self._note(scope, failed)

    async def _note(self, scope: Scope, status: int) -> None:
        matches = ((place, place.path.match(scope["path"])) for place in self._places)
        found = next(((p, m) for p, m in matches if m is not None and p.method == scope["method"]), None)
        if found is None:
            return
        identity: Identity = scope.get(KEY, NOBODY)
        caller = identity.token_id or caller_address(scope)
        try:
            self._refusals.require(caller, "too many attempts without effect")
            self._refusals.take(caller)
            names = tuple(found[1].groupdict().values())
            await in_writer(audit.note_refusal, self._context, found[0].action, names[0] if names else None, status)
        except PipeplanError as error:
            self._context.metrics.unaudited.inc()
            LOG.warning("an attempt at %s without effect is not in the audit log: %s", found[0].action, error)
