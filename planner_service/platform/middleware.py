"""Headers: what every answer tells a browser it may do with it. Whoever answers may have said it more exactly.

Limits: how often one caller may ask, how large a request's head may be, and how slowly its body may come.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address, ip_network

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.errors import TooManyRequestsError
from pipeplan.protocol.problems import Problem
from planner_service.platform.problems import problem_response

POLICY = b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""An answer of the API is no page: it loads nothing and stands in no frame. The dashboard's pages have their own."""

ALWAYS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
NO_STORE = (b"cache-control", b"no-store")
STRICT_TRANSPORT = (b"strict-transport-security", b"max-age=31536000")


class SecurityHeaders:
    """Adds them. Answers that do not say how they may be kept are not kept."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        encrypted = scope.get("scheme") == "https"

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _completed(list(message.get("headers", ())), encrypted=encrypted)
            await send(message)

        await self._app(scope, receive, marked)


def _completed(headers: list[tuple[bytes, bytes]], *, encrypted: bool) -> list[tuple[bytes, bytes]]:
    said = {name.lower() for name, _ in headers}
    headers += [header for header in ALWAYS if header[0] not in said]
    if not said & {b"cache-control", b"etag"}:
        headers.append(NO_STORE)
    if encrypted:
        headers.append(STRICT_TRANSPORT)
    return headers


MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
MAX_TARGET_BYTES = 8 * 1024
MAX_PARAMETERS = 100
MAX_CALLERS = 10_000
IPV6_NETWORK_BITS = 64


class Rates:
    """A bucket for each caller: it holds `burst` requests at most and is filled by `per_s` a second.

    What it counts is this process's alone. The buckets that were not asked for the longest go when there are too many.
    """

    def __init__(self, per_s: float, burst: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._now_s = now_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str) -> float:
        """How long until the caller may ask again; 0 for at once."""
        left = self._left(caller)
        return 0.0 if left >= 1.0 else (1.0 - left) / self._per_s

    def take(self, caller: str) -> None:
        """Counts a request."""
        self._buckets[caller] = (self._left(caller) - 1.0, self._now_s())
        self._buckets.move_to_end(caller)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)

    def require(self, caller: str, what: str) -> None:
        """Raises TooManyRequestsError unless the caller may ask now."""
        wait_s = self.wait_s(caller)
        if wait_s > 0:
            raise TooManyRequestsError(f"{what}; come back in {wait_s:.1f} s", wait_s)

    def _left(self, caller: str) -> float:
        left, at_s = self._buckets.get(caller, (self._burst, 0.0))
        return min(self._burst, left + self._per_s * max(0.0, self._now_s() - at_s))


class RequestLimits:
    """Refuses requests whose head is too large, before anything reads it, and ends those whose body does not come."""

    def __init__(self, app: ASGIApp, *, body_timeout_s: float) -> None:
        self._app = app
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is of a size that anybody needs."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = _too_large(scope)
        if refusal is not None:
            await problem_response(_problem(*refusal))(scope, receive, send)
            return
        await self._app(scope, self._timed(receive) if _has_body(scope) else receive, send)

    def _timed(self, receive: Receive) -> Receive:
        """The body's messages, all of them within the time for one. After it there is nothing to wait for."""
        deadline_s = time.monotonic() + self._body_timeout_s
        whole = False

        async def timed() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                return {"type": "http.disconnect"}
            whole = not message.get("more_body", False)
            return message

        return timed


def address_of(scope: Scope) -> str:
    """Where a request comes from: its address, of IPv6 the network that one customer has."""
    client = scope.get("client")
    host: str = client[0] if client else "unknown"
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        return str(ip_network((address, IPV6_NETWORK_BITS), strict=False))
    return host


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _too_large(scope: Scope) -> tuple[HTTPStatus, str] | None:
    headers = scope["headers"]
    query: bytes = scope["query_string"]
    if len(scope.get("raw_path") or b"") + len(query) > MAX_TARGET_BYTES:
        return HTTPStatus.REQUEST_URI_TOO_LONG, f"the address must have at most {MAX_TARGET_BYTES} bytes"
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        rule = f"the headers must be at most {MAX_HEADERS}, of {MAX_HEADER_BYTES} bytes together"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, rule
    if query.count(b"&") >= MAX_PARAMETERS:
        return HTTPStatus.UNPROCESSABLE_ENTITY, f"the address must have at most {MAX_PARAMETERS} parameters"
    return None


def _problem(status: HTTPStatus, detail: str) -> Problem:
    return Problem(title=status.phrase, status=status, detail=detail)
