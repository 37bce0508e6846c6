"""Middleware of access: the layers before the caller is identified.

`Access` gives every request an id, a line in the log and its place in the metrics, also without a route. `Guard` keeps
pages of other sites from reaching the service through a browser that can reach it.
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

from pipeplan.protocol.tokens import is_loopback
from planner_service.access.auth import same_origin
from planner_service.platform.logs import REQUEST_ID
from planner_service.platform.metrics import METHODS, Metrics
from planner_service.platform.problems import plain
from planner_service.platform.requests import KEY

HEADER = "X-Request-ID"
UNKNOWN_ROUTE = "unmatched"
HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
METRICS_PATH = "/metrics"
LOG = logging.getLogger("pipeplan.access")
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def assign(headers: Headers) -> str:
    """The request's id, which log lines and problems carry from here on; the caller's own where it is a plain word."""
    given = headers.get(HEADER, "")
    request_id = given if _SANE.fullmatch(given) else secrets.token_hex(16)
    REQUEST_ID.set(request_id)
    return request_id


class Access:
    """Runs before everything else. It logs a request's route, never its path, which may hold anything."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            self._record(scope, status, time.perf_counter() - start_s)

    def _record(self, scope: Scope, status: int, duration_s: float) -> None:
        """Writes the line and counts the request."""
        # A route's template, or a mounted folder's path, or the name of a route of the framework.
        path = getattr(scope.get("route"), "path", None) or scope.get("root_path")
        route = str(path or getattr(scope.get("endpoint"), "__name__", UNKNOWN_ROUTE))
        method = scope["method"]
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


class Guard:
    """Refuses requests under a foreign host name (DNS rebinding), and requests from pages of other sites.

    `hosts` are the service's names besides this machine's own; None allows any. Any name may be allowed only if every
    request needs a token: a page that was rebound to the service has none. Health checks may use any name. So may
    requests for metrics, if they need a token (`tokens`): both reach pods by address.
    """

    def __init__(self, app: ASGIApp, *, hosts: tuple[str, ...] | None = (), tokens: bool = False) -> None:
        self._app = app
        self._under_any_name = frozenset({METRICS_PATH} if tokens else ())
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in HEALTH_PATHS:  # a container's supervisor asks by address, and learns little
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        any_name = self._hosts is None or scope["path"] in self._under_any_name
        if not any_name and not is_loopback(_name(host)) and _name(host) not in (self._hosts or ()):
            names = "this machine's own names, such as 127.0.0.1, and PIPEPLAN_ALLOWED_HOSTS"
            reason = f"the service answers on {names} only; asked for was {host!r}"
        elif origin is not None and not same_origin(origin, host):
            reason = f"requests from pages of {origin!r} are refused"
        else:
            await self._app(scope, receive, send)
            return
        await plain(HTTPStatus.FORBIDDEN, reason)(scope, receive, send)


@lru_cache(256)
def _name(host: str) -> str:
    """The name in a Host header, without its port; empty where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
