"""A service of the tests' own making: it answers what it is given to answer, to both clients."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from pipeplan.client.client import AsyncClient, Client
from pipeplan.client.connection import RetryClock

Answering = Callable[[httpx.Request], httpx.Response]


def problem(status: int, slug: str, **headers: str) -> httpx.Response:
    """The service's answer to what it refuses."""
    content = {"type": f"urn:pipeplan:problem:{slug}", "title": "no", "status": status, "detail": "no"}
    return httpx.Response(status, json=content, headers=headers)


class Scripted(httpx.MockTransport):
    """Gives one answer or error after the other, the last again and again, and keeps what was asked."""

    def __init__(self, *outcomes: httpx.Response | Exception) -> None:
        self.asked: list[httpx.Request] = []
        self._outcomes = list(outcomes)
        super().__init__(self._next)

    def _next(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return httpx.Response(outcome.status_code, headers=outcome.headers, content=outcome.content)


class Time:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    @property
    def clock(self) -> RetryClock:
        """It as clients know it."""

        async def sleep_async(duration_s: float) -> None:
            self.slept.append(duration_s)

        return RetryClock(now_s=lambda: sum(self.slept), sleep=self.slept.append, sleep_async=sleep_async)


def asked_of(
    kind: type[Client] | type[AsyncClient], transport: httpx.MockTransport, time: Time, **settings: Any
) -> Any:
    """A function `ask(name, *arguments)`: what an operation of such a client returns, a list for pages."""
    if kind is Client:

        def ask(name: str, *arguments: Any, **named: Any) -> Any:
            with Client("http://127.0.0.1:1", transport=transport, clock=time.clock, **settings) as client:
                found = getattr(client, name)(*arguments, **named)
                return list(found) if hasattr(found, "__next__") else found

        return ask

    def ask_async(name: str, *arguments: Any, **named: Any) -> Any:
        async def main() -> Any:
            async with AsyncClient("http://127.0.0.1:1", transport=transport, clock=time.clock, **settings) as client:
                found = getattr(client, name)(*arguments, **named)
                return [item async for item in found] if hasattr(found, "__anext__") else await found

        return asyncio.run(main())

    return ask_async
