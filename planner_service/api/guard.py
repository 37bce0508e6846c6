"""Guard: pages of other sites, opened in a browser on this machine, must not reach the service through it."""

from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from planner_service.api.problems import problem_response
from planner_service.contract.http import is_loopback
from planner_service.contract.problems import Problem


class Guard:
    """Refuses requests under a foreign name (DNS rebinding) and requests that another site's page sends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may pass."""
        reason = _refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
            return
        status = HTTPStatus.FORBIDDEN
        problem = Problem(title=status.phrase, status=status, detail=reason)
        await problem_response(problem)(scope, receive, send)


def _refusal(headers: Headers) -> str | None:
    host = headers.get("host", "")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):
        return f"the service answers on this machine's own names only, such as 127.0.0.1; asked for was {host!r}"
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return f"requests from pages of {origin!r} are refused"
    return None
