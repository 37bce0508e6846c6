"""Base path: the service under a path of a shared host, as behind a proxy (`/pipeplan/`).

Requests come with the path or, if the proxy removes it, without it; everything below sees them without. Every address
that leads back has it: links and forms in pages, `Location`, the cookie's path, the description's server.
"""

from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEY = "pipeplan.base_path"
LEADING = frozenset({b"location", b"content-location"})
"""The headers that hold addresses."""


def base_of(scope: Mapping[str, Any]) -> str:
    """The base path of a request, such as /pipeplan; empty at a host's root."""
    base: str = scope.get(KEY, "")
    return base


class BasePath:
    """Runs before everything else: removes the base path from requests, and adds it to the headers that lead back."""

    def __init__(self, app: ASGIApp, base: str) -> None:
        self._app = app
        self._base = base

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._base:
            await self._app(scope, receive, send)
            return
        inner = dict(scope) | {KEY: self._base}
        inner["path"] = self._without(scope["path"])
        if scope.get("raw_path") is not None:
            inner["raw_path"] = self._without(scope["raw_path"].decode("latin-1")).encode("latin-1")

        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        origin = scope["scheme"].encode() + b"://" + host  # the framework's own redirects name it

        async def led_back(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, self._led(value, origin) if name.lower() in LEADING else value)
                    for name, value in message.get("headers", ())
                ]
            await send(message)

        await self._app(inner, receive, led_back)

    def _without(self, path: str) -> str:
        if path == self._base:
            return "/"
        return path.removeprefix(self._base) if path.startswith(f"{self._base}/") else path

    def _led(self, address: bytes, origin: bytes) -> bytes:
        """The address with the path, if it is one on this service."""
        start, rest = (origin, address[len(origin) :]) if address.startswith(origin + b"/") else (b"", address)
        is_ours = rest.startswith(b"/") and not rest.startswith(b"//")
        return start + self._base.encode() + rest if is_ours else address
