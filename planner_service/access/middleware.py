"""Request ids: in every answer, every log line and every problem. A caller's own is taken where it is a plain word.

Access: every request has an id, a line in the log and its place in the metrics, whoever answers it.

Guard: pages of other sites, opened in a browser that reaches the service, must not reach it through the browser.
"""

import logging
import re
import secrets
import time
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.client.connection import is_loopback
from pipeplan.protocol.problems import Problem
from planner_service.access.auth import same_origin
from planner_service.platform.logs import REQUEST_ID
from planner_service.platform.metrics import METHODS, Metrics
from planner_service.platform.problems import problem_response
from planner_service.platform.requests import KEY

HEADER = "X-Request-ID"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def assign(headers: Headers) -> str:
    """The request's id, from here on this request's in the logs."""
    given = headers.get(HEADER, "")
    request_id = given if _SANE.fullmatch(given) else secrets.token_hex(16)
    REQUEST_ID.set(request_id)
    return request_id


UNKNOWN_ROUTE = "unmatched"
LOG = logging.getLogger("pipeplan.access")


class Access:
    """Stands before everything else. What a path holds is never written: its route is."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on, and tells of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        request_id = assign(Headers(scope=scope))
        status = 500

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER.lower().encode(), request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, marked)
        finally:
            self._tell(scope, status, time.perf_counter() - start_s)

    def _tell(self, scope: Scope, status: int, duration_s: float) -> None:
        route, method = _route(scope), scope["method"]
        self._metrics.observe_request(route=route, method=method, status=status, duration_s=duration_s)
        if not LOG.isEnabledFor(logging.INFO):
            return
        identity = scope.get(KEY)
        fields = {
            "method": method if method in METHODS else "other",
            "route": route,
            "status": status,
            "duration_ms": round(1e3 * duration_s, 3),
            "caller": None if identity is None else identity.name,
        }
        LOG.info("request", extra={"fields": fields})


def _route(scope: Scope) -> str:
    """The route's template; a mounted folder's own path; the name of what the framework adds; or that there is none."""
    path = getattr(scope.get("route"), "path", None) or scope.get("root_path")
    return str(path or getattr(scope.get("endpoint"), "__name__", UNKNOWN_ROUTE))


class Guard:
    """Refuses requests under a foreign name (DNS rebinding) and requests that another site's page sends.

    `hosts` are the names that the service has besides this machine's own; None: any. Only where every request needs a
    token may they be any: a page that has been rebound to the service has none.
    """

    def __init__(self, app: ASGIApp, *, hosts: tuple[str, ...] | None = ()) -> None:
        self._app = app
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may pass."""
        reason = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
            return
        status = HTTPStatus.FORBIDDEN
        problem = Problem(title=status.phrase, status=status, detail=reason)
        await problem_response(problem)(scope, receive, send)

    def _refusal(self, headers: Headers) -> str | None:
        host = headers.get("host", "")
        if not self._is_ours(host):
            names = "this machine's own names, such as 127.0.0.1, and PIPEPLAN_ALLOWED_HOSTS"
            return f"the service answers on {names} only; asked for was {host!r}"
        origin = headers.get("origin")
        if origin is not None and not same_origin(origin, host):
            return f"requests from pages of {origin!r} are refused"
        return None

    def _is_ours(self, host: str) -> bool:
        if self._hosts is None:
            return True
        return _is_this_machine(host) or _name(host) in self._hosts


@lru_cache(256)
def _is_this_machine(host: str) -> bool:
    return is_loopback(_name(host))


def _name(host: str) -> str:
    """The name in a Host header, without its port; empty where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
