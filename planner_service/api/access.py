"""Access: every request has an id, a line in the log and its place in the metrics, whoever answers it."""

import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner_service.api.auth import KEY
from planner_service.api.request_ids import HEADER, assign
from planner_service.metrics import METHODS, Metrics

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
