"""Middleware: the security headers of every answer, and the limits of every request.

`SecurityHeaders` adds the headers that tell a browser what it may do with an answer; an answer that sets one itself
keeps its own. `Rates` counts how often a caller asks. `RequestLimits` bounds the size of a request's head and the time
that its body takes to arrive.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeplan.documents.names import on_one_line
from pipeplan.errors import InvalidInputError, NotFoundError, PipeplanError, TooManyRequestsError
from planner_service.platform.problems import plain, send_error

POLICY = b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""An answer of the API is not a page: it loads nothing and cannot be framed. Pages have their own policy."""

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

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
MAX_TARGET_BYTES = 8 * 1024
MAX_PARAMETERS = 100
MAX_CALLERS = 10_000
IPV6_NETWORK_BITS = 64


class SecurityHeaders:
    """Adds the security headers. An answer without a Cache-Control is not cached."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and completes the headers of the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        encrypted = scope.get("scheme") == "https"

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                said = {name.lower() for name, _ in headers}
                headers += [header for header in ALWAYS if header[0] not in said]
                if not said & {b"cache-control", b"etag"}:
                    headers.append(NO_STORE)
                if encrypted:
                    headers.append(STRICT_TRANSPORT)
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, marked)


class Rates:
    """A token bucket for each caller: its capacity is `burst` requests, and it refills at `per_s` a second.

    Each process counts for itself. Beyond MAX_CALLERS, the bucket that has been unused for the longest time is dropped.
    """

    def __init__(self, per_s: float, burst: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._now_s = now_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str) -> float:
        """How long until the caller may ask again; 0: now."""
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
    """Refuses requests whose head is too large or holds null characters, and ends those whose body does not arrive."""

    def __init__(self, app: ASGIApp, *, body_timeout_s: float) -> None:
        self._app = app
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on requests within the limits, and refuses the others."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = _too_large(scope)
        if refusal is not None:
            await plain(*refusal)(scope, receive, send)
            return
        refused = _not_text(scope)
        if refused is not None:
            await send_error(refused, scope, receive, send)
            return
        if not any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        deadline_s = time.monotonic() + self._body_timeout_s
        whole = False

        async def timed() -> Message:
            """The body's next message, or a disconnect once the time is over. After the body nothing is timed."""
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

        await self._app(scope, timed, send)


def caller_address(scope: Scope) -> str:
    """Where a request comes from: its address, or for IPv6 the network of one customer."""
    client = scope.get("client")
    host: str = client[0] if client else "unknown"
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        return str(ip_network((address, IPV6_NETWORK_BITS), strict=False))
    return host


def _too_large(scope: Scope) -> tuple[HTTPStatus, str] | None:
    """The status and the rule for a request whose head is too large; None for any other."""
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


def _not_text(scope: Scope) -> PipeplanError | None:
    """The answer to a path with a control character, and to a query with the null character, which PostgreSQL
    refuses; None for any other address. A route's pattern would end before a line's end: `/v1/aliases/a%0a` is not `a`.
    """
    if on_one_line(scope["path"]) != scope["path"]:
        return NotFoundError("there is nothing at an address with a control character")
    if b"%00" in scope["query_string"]:
        for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
            if "\0" in name or "\0" in value:
                return InvalidInputError(name, "must not hold a null character", value)
    return None
