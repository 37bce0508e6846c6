"""Connections: limits on a request's bytes and time before its head is complete, and on open connections.

The middleware sees a request only when its head is complete, and the parser of heads has no limits. This protocol
therefore counts bytes and seconds itself. `_bytes` counts bytes without progress: since the head began, or since the
last byte of a body. The sizes, extensions and trailers of chunks thus count, too. Progress resets the count, and the
rest of the same read does not count.

    open ──▶ head ──whole──▶ body ──whole──▶ head of the next request ...
             15 s, 64 KiB    64 KiB without a byte of the body

Once a limit is exceeded, the connection gets an answer and is closed: at once, or after a response in progress.
"""

import asyncio
import logging
import sys
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from planner_service.platform.middleware import ALWAYS, MAX_HEADERS, NO_STORE
from planner_service.platform.problems import plain

HEAD_BYTES = 64 * 1024
HEAD_S = 15.0
"""The limits of a request's head, from its first byte; for the first head, from the connection's beginning."""

UNREAD_BODY_S = 60.0
"""How long the rest of a body may take that was answered before it was whole."""

MAX_PIPELINED = 16
"""How many requests may wait on a connection for the answer to an earlier one."""

DISCARDED_BYTES = 2**20
DISCARDED_S = 2.0
"""How much, and for how long, a refused caller may still send: an early close would take the answer from it."""

OTHER_CONNECTIONS = 500
"""The upper bound on open connections that are not event streams."""

OTHER_FILES = 256
"""Open files that are not connections: databases, pipes of processes."""

SHARE_CLOSED = 8
"""If no connection is free, 1 / SHARE_CLOSED of the waiting ones are closed."""

RETRY_AFTER_S = 1
LOG = logging.getLogger("pipeplan.access")


def most_connections(event_streams: int) -> int:
    """The upper bound on open connections, `event_streams` included, within the system's limit on open files.

    It raises that limit as far as this process may.
    """
    wanted = event_streams + OTHER_CONNECTIONS
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + OTHER_FILES:
        soft = wanted + OTHER_FILES if hard == resource.RLIM_INFINITY else min(wanted + OTHER_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - OTHER_FILES)
    return wanted


class BoundedProtocol(HttpToolsProtocol):
    """A connection with limits on heads, on bytes without progress in bodies, and on the number of connections.

    The configuration's `limit_concurrency` is the upper bound on connections. Beyond it, those that have waited longest
    without a request are closed; if all have requests, the new one gets a 503.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._max_connections = self.limit_concurrency
        self.limit_concurrency = None  # counted here, when a connection begins
        self._bytes = 0
        self._in_body = False
        self._refused = False
        self._discards = False
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_since_s = self.loop.time()

    @property
    def _waits(self) -> bool:
        return not self._discards and (self.cycle is None or self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection, after closing refused and longest-waiting ones beyond the limit, or refuses it."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_S, self._late)
        most = self._max_connections
        if most is None or len(self.connections) <= most:
            return
        others = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
        refused = [one for one in others if one._discards]
        waiting = sorted((one for one in others if one._waits), key=lambda one: one._waits_since_s)
        # Several at once: a look at all connections for each new one would take longer than the new one.
        for one in refused + waiting[: max(1, len(waiting) // SHARE_CLOSED)]:
            self.connections.discard(one)
            one.transport.abort()
        if len(self.connections) > most:
            rule = f"{most} connections are open already, all with requests"
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, rule)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers."""
        self._time(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received bytes up to the limit. Refuses further ones without progress."""
        if self._discards:
            self._bytes += len(data)
            if self._bytes >= DISCARDED_BYTES:
                self.transport.abort()
            return
        if not self._in_body and self._deadline is None:
            self._time(HEAD_S)
        while data and not self._refused and not self.transport.is_closing():
            part, data = data[: HEAD_BYTES - self._bytes], data[HEAD_BYTES - self._bytes :]
            self._bytes += len(part)
            super().data_received(part)
            if self._bytes >= HEAD_BYTES:
                rule = f"the head, and what is between the bytes of a body, must have at most {HEAD_BYTES} bytes"
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, rule)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header, up to the one that shows the middleware that there are too many; none of a trailer."""
        if not self._in_body and len(self.headers) <= MAX_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts the request. Raises ValueError, which ends the connection, where too many wait."""
        if len(self.pipeline) == MAX_PIPELINED:
            raise ValueError("too many requests wait for the answers to earlier ones")
        self._bytes, self._in_body = 0, True
        self._time(None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Counts from here."""
        self._bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next byte belongs to the next head."""
        self._bytes, self._in_body = 0, False
        self._time(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begins to wait: for the rest of a body that is not read, or for the next request."""
        self._waits_since_s = self.loop.time()
        if self._in_body:
            self._time(UNREAD_BODY_S)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are not HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _time(self, duration_s: float | None) -> None:
        """Begins the present wait anew; None ends it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if duration_s is None else self.loop.call_later(duration_s, self._late)

    def _late(self) -> None:
        """The time limit of a wait has passed."""
        self._deadline = None
        if self._discards or self._in_body:
            self.transport.abort()
        elif self.flow.read_paused:  # we read no further: the caller is not late
            self._time(HEAD_S)
        elif self._bytes == 0:
            self.transport.close()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the head must arrive within {HEAD_S:g} s")

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Ends the connection, with this answer if it can be given now. Whole requests are answered first."""
        if self._refused:
            return
        self._refused = True
        self._time(None)
        address = None if self.client is None else self.client[0]
        LOG.info("connection refused", extra={"fields": {"status": int(status), "address": address}})
        cycle = self.cycle
        if cycle is not None and not self._in_body and not cycle.response_complete:
            cycle.keep_alive = False
            self.transport.pause_reading()
            return
        if cycle is not None and self._in_body:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started or self.pipeline:
                self.transport.abort()
                return
        self._unset_keepalive_if_required()
        self._discards, self._bytes = True, 0
        self.transport.write(_answer(status, detail, self.server_state.default_headers))
        self.transport.write_eof()
        self._time(DISCARDED_S)


def _answer(status: HTTPStatus, detail: str, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    """A problem as it is sent, with the headers of every answer."""
    response = plain(status, detail)
    headers = [*default_headers, *ALWAYS, NO_STORE, *response.raw_headers, (b"connection", b"close")]
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return STATUS_LINE[status] + lines + b"\r\n" + bytes(response.body)
