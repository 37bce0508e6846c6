"""Connection: the HTTP of all clients of the service, blocking and asynchronous, by httpx.

Both kinds perform the same operations (`client.exchange`), and know nothing about their content.
"""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import httpx

from pipeplan.client.exchange import (
    DEFAULT_URL,
    Outcome,
    Parameters,
    Pause,
    Received,
    Send,
    ServiceExchange,
    Steps,
    Unreached,
)
from pipeplan.errors import InvalidInputError, require
from pipeplan.protocol.tokens import is_loopback

TIMEOUT_S = 60.0
"""A request without an answer for this time is given up."""

LOG = logging.getLogger("pipeplan")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryClock:
    """Real time, or a test's."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(slots=True)
class Connection:
    """A service by its URL. Raises the error in the service's problem details, ServiceError if it is out of reach."""

    url: str
    token: str | None = field(default=None, repr=False)
    transport: httpx.BaseTransport | None = None
    clock: RetryClock = field(default_factory=RetryClock)
    timeout_s: float = TIMEOUT_S
    patience_s: float = 0.0
    exchange: ServiceExchange = field(init=False)
    _client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        settings = _settings(self.url, self.token, self.timeout_s)
        self.exchange = ServiceExchange(url=self.url, patience_s=self.patience_s)
        self._client = httpx.Client(**settings, transport=self.transport)

    def run(self, steps: Steps[T]) -> T:
        """Performs an operation. An interrupt is raised inside the operation, which may send a last request."""
        resume: Callable[[], Send | Pause] = partial(steps.send, None)
        while True:
            try:
                step = resume()
            except StopIteration as ended:
                result: T = ended.value
                return result
            try:
                resume = partial(steps.send, self._perform(step))
            except BaseException as error:
                resume = partial(steps.throw, error)

    def get(self, path: str, parameters: Parameters | None = None) -> bytes:
        return self.run(self.exchange.get(path, parameters))

    def post(self, path: str, body: str | None = None, *, patience_s: float | None = None) -> bytes:
        """The answer to a JSON body; with a patience, to one that the service accepts only once, however often sent."""
        return self.run(self.exchange.post(path, body, patience_s=patience_s))

    @contextmanager
    def lines(self, path: str, headers: Mapping[str, str], *, silence_s: float) -> Iterator[Iterator[str]]:
        """The lines of an answer as they come. Raises ServiceError if nothing comes for this time, or it breaks off."""
        _require_open(self._client.is_closed, self.url)
        timeout = httpx.Timeout(self.timeout_s, read=silence_s)
        try:
            with self._client.stream("GET", path, headers=headers, timeout=timeout) as answer:
                if not answer.is_success:
                    answer.read()
                    raise self.exchange.error_of(_received(answer, 0.0))
                yield answer.iter_lines()
        except httpx.RequestError as error:
            raise self.exchange.error_of(_unreached(error, 0.0)) from error

    def close(self) -> None:
        self._client.close()

    def _perform(self, step: Send | Pause) -> Outcome | None:
        if isinstance(step, Pause):
            self.clock.sleep(step.duration_s)
            return None
        _require_open(self._client.is_closed, self.url)
        started_s = self.clock.now_s()
        try:
            answer = self._client.send(self._client.build_request(**_request(step)))
        except httpx.RequestError as error:
            return _unreached(error, self.clock.now_s() - started_s)
        return _received(answer, self.clock.now_s() - started_s)


@dataclass(slots=True)
class AsyncConnection:
    """The same for programs that await."""

    url: str
    token: str | None = field(default=None, repr=False)
    transport: httpx.AsyncBaseTransport | None = None
    clock: RetryClock = field(default_factory=RetryClock)
    timeout_s: float = TIMEOUT_S
    patience_s: float = 0.0
    exchange: ServiceExchange = field(init=False)
    _client: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        settings = _settings(self.url, self.token, self.timeout_s)
        self.exchange = ServiceExchange(url=self.url, patience_s=self.patience_s)
        self._client = httpx.AsyncClient(**settings, transport=self.transport)

    async def run(self, steps: Steps[T]) -> T:
        """Performs an operation. A cancellation is raised inside the operation, which may send a last request."""
        resume: Callable[[], Send | Pause] = partial(steps.send, None)
        while True:
            try:
                step = resume()
            except StopIteration as ended:
                result: T = ended.value
                return result
            try:
                resume = partial(steps.send, await self._perform(step))
            except BaseException as error:
                resume = partial(steps.throw, error)

    @asynccontextmanager
    async def lines(
        self, path: str, headers: Mapping[str, str], *, silence_s: float
    ) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of an answer as they come. Raises ServiceError if nothing comes for this time, or it breaks off."""
        _require_open(self._client.is_closed, self.url)
        timeout = httpx.Timeout(self.timeout_s, read=silence_s)
        try:
            async with self._client.stream("GET", path, headers=headers, timeout=timeout) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise self.exchange.error_of(_received(answer, 0.0))
                yield answer.aiter_lines()
        except httpx.RequestError as error:
            raise self.exchange.error_of(_unreached(error, 0.0)) from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _perform(self, step: Send | Pause) -> Outcome | None:
        if isinstance(step, Pause):
            await self.clock.sleep_async(step.duration_s)
            return None
        _require_open(self._client.is_closed, self.url)
        started_s = self.clock.now_s()
        try:
            answer = await self._client.send(self._client.build_request(**_request(step)))
        except httpx.RequestError as error:
            return _unreached(error, self.clock.now_s() - started_s)
        return _received(answer, self.clock.now_s() - started_s)


def _settings(url: str, token: str | None, timeout_s: float) -> dict[str, Any]:
    """The arguments of httpx's clients. Raises InvalidInputError for an invalid URL or token."""
    rule = "must be a URL such as " + DEFAULT_URL
    try:
        base_url = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidInputError("url", rule, url) from error
    require(base_url.scheme in ("http", "https") and bool(base_url.host), "url", rule, url)

    headers = {}
    if token:
        # A token that no header can hold is still a secret: the error does not show it.
        plain = token.isascii() and token.isprintable() and " " not in token
        require(plain, "token", "must be a token as `pipeplan token create` shows it", "another text")
        headers["Authorization"] = f"Bearer {token}"
        if base_url.scheme == "http" and not is_loopback(base_url.host):
            LOG.warning(
                "the token goes to %s unencrypted, and anybody on the way can read it; use https", base_url.host
            )
    here = is_loopback(base_url.host)
    settings = {"base_url": base_url, "headers": headers, "timeout": timeout_s, "trust_env": not here}
    authorities = os.environ.get("SSL_CERT_FILE")
    if base_url.scheme == "https" and authorities:
        try:
            settings["verify"] = ssl.create_default_context(cafile=authorities)
        except OSError as error:
            raise InvalidInputError("SSL_CERT_FILE", "must name a file of certificates", authorities) from error
    return settings


def _require_open(closed: bool, url: str) -> None:
    require(not closed, "client", "must be open; it was closed", url)


def _request(send: Send) -> dict[str, Any]:
    return {
        "method": send.method,
        "url": send.path,
        "params": send.parameters,
        "content": send.body,
        "headers": send.headers,
    }


def _received(answer: httpx.Response, took_s: float) -> Received:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    url = f"{answer.request.method} {answer.request.url}"
    content, reason = answer.content, answer.reason_phrase
    return Received(status=answer.status_code, reason=reason, headers=headers, content=content, url=url, took_s=took_s)


def _unreached(error: httpx.RequestError, took_s: float) -> Unreached:
    before = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    taken, passing = not isinstance(error, before), not isinstance(error, before) or cause is None
    return Unreached(cause=error, taken=taken, took_s=took_s, passing=passing)
