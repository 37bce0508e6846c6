"""Guard: pages of other sites, opened in a browser that reaches the service, must not reach it through the browser."""

from functools import lru_cache
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from planner_service.api.auth import same_origin
from planner_service.api.problems import problem_response
from planner_service.contract.http import is_loopback
from planner_service.contract.problems import Problem


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
