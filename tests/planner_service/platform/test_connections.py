"""Connections on the wire: heads without an end, framing without a body, and connections without number."""

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from planner_service.platform.connections import (
    DISCARDED_BYTES,
    DISCARDED_S,
    HEAD_BYTES,
    HEAD_S,
    MAX_PIPELINED,
    UNREAD_BODY_S,
    BoundedProtocol,
)
from tests.planner_service.servers import forked
from tests.waiting import PATIENCE_S

GET = b"GET / HTTP/1.1\r\nHost: here\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
FLOOD_BYTES = 40 * 10**6

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward."""

    skipped_s = 0.0

    def time(self) -> float:
        """The time with what was skipped."""
        return super().time() + self.skipped_s


async def skip(duration_s: float) -> None:
    """Puts the clock forward, and lets the timers run that are due."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skipped_s += duration_s
    for _ in range(10):
        await asyncio.sleep(0)


class Service:
    """A service behind bounded connections: /slow waits until `go_on`, /deaf reads no body, all else echoes it."""

    def __init__(self, max_connections: int) -> None:
        self.go_on = asyncio.Event()
        self.started = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        config = uvicorn.Config(
            self._answer, interface="asgi3", http=BoundedProtocol, limit_concurrency=max_connections, lifespan="off"
        )
        config.load()
        self.state = uvicorn.Server(config).server_state
        self._protocol = lambda: BoundedProtocol(config, self.state, {}, asyncio.get_running_loop())

    async def __aenter__(self) -> "Service":
        self._server = await asyncio.get_running_loop().create_server(self._protocol, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.go_on.set()
        self._server.close()
        for connection in list(self.state.connections):
            connection.transport.abort()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self.state.tasks, *(one.wait_closed() for one in self._writers), return_exceptions=True)

    async def connect(self) -> Streams:
        """A new connection, once the service has it."""
        before = self.state.connections.copy()
        streams = await asyncio.open_connection(*self._server.sockets[0].getsockname())
        while self.state.connections <= before:
            await asyncio.sleep(0)
        self._writers.append(streams[1])
        return streams

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        self.started.set()
        if scope["path"] == "/slow":
            await self.go_on.wait()
        while scope["path"] != "/deaf":
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        content = json.dumps({"body": body.decode(), "headers": len(scope["headers"])}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})


def on_wire(talk: Callable[[Service], Awaitable[None]], max_connections: int = 100) -> None:
    """Lets the coroutine talk to a service, in a loop whose clock can be put forward."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S + 2 * UNREAD_BODY_S), Service(max_connections) as service:
            await talk(service)

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(main())


async def status_and_end(reader: asyncio.StreamReader) -> int:
    """The status of the answer, once the service has ended the connection; 0 without an answer."""
    try:
        said = await reader.read()
    except ConnectionError:
        return 0
    found = re.match(rb"HTTP/1.1 ([45]\d+)", said)
    if found is None:
        return 0
    assert b"connection: close" in said and b"content-security-policy" in said
    assert json.loads(said.partition(b"\r\n\r\n")[2])["status"] == int(found[1])
    return int(found[1])


async def echoed(streams: Streams) -> dict[str, object]:
    """The answer of a request, on a connection that stays."""
    reader, _ = streams
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    size = int(await reader.readline(), 16)
    content = await reader.readexactly(size)
    await reader.readuntil(b"0\r\n\r\n")
    answer: dict[str, object] = json.loads(content)
    return answer


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /", b"x"),
        (b"G", b"E"),
        (b"", b"\r\n"),
        (GET, b"a: b\r\n"),
        (GET + b"a: ", b"x"),
        (GET, b"x"),
        (GET + b"a: b\r\n", b" x\r\n"),
        (CHUNKED + b"1;", b"x"),
        (CHUNKED + b"1;a=", b'"x'),
        (CHUNKED, b"0"),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"a: b\r\n"),
        (CHUNKED + b"0\r\na: ", b"x"),
    ],
)
def test_what_has_no_end_is_refused_at_its_limit(start: bytes, more: bytes) -> None:
    async def talk(service: Service) -> None:
        reader, writer = await service.connect()
        writer.write(start + more * (2 * HEAD_BYTES // len(more) + 1))
        assert await status_and_end(reader) in (400, 431)
        await skip(DISCARDED_S)
        assert not service.state.connections

    on_wire(talk)


def test_a_whole_head_up_to_the_limit_passes_whatever_pieces_it_comes_in() -> None:
    async def talk(service: Service) -> None:
        head = GET + b"a: " + b"x" * (HEAD_BYTES - len(GET) - 7) + b"\r\n\r\n"
        assert len(head) == HEAD_BYTES
        streams = await service.connect()
        for size in (1000, 60_000, len(head)):
            for start in range(0, len(head), size):
                streams[1].write(head[start : start + size])
                await asyncio.sleep(0)
            assert (await echoed(streams))["headers"] == 2

    on_wire(talk)


def test_a_byte_more_than_the_limit_is_refused() -> None:
    async def talk(service: Service) -> None:
        reader, writer = await service.connect()
        writer.write(GET + b"a: " + b"x" * (HEAD_BYTES - len(GET) - 6) + b"\r\n\r\n")
        assert await status_and_end(reader) == 431

    on_wire(talk)


def test_headers_beyond_what_is_refused_anyway_and_trailers_are_not_kept() -> None:
    async def talk(service: Service) -> None:
        streams = await service.connect()
        streams[1].write(GET + b"a: b\r\n" * 1000 + b"\r\n")
        assert (await echoed(streams))["headers"] == 101
        streams[1].write(CHUNKED + b"2\r\nxy\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
        assert await echoed(streams) == {"body": "xy", "headers": 2}

    on_wire(talk)


def test_a_body_of_small_chunks_and_a_long_one_arrive() -> None:
    async def talk(service: Service) -> None:
        streams = await service.connect()
        streams[1].write(CHUNKED + b"1;a=b\r\nx\r\n" * 40_000 + b"0\r\n\r\n")
        assert (await echoed(streams))["body"] == "x" * 40_000
        streams[1].write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 10**6)
        assert (await echoed(streams))["body"] == "x" * 10**6

    on_wire(talk)


@pytest.mark.parametrize(("start", "more"), [(b"GET /", b"a"), (GET, b"a"), (GET + b"a: ", b"b"), (b"", b"\n")])
def test_a_head_that_comes_byte_by_byte_ends_in_time(start: bytes, more: bytes) -> None:
    async def talk(service: Service) -> None:
        reader, writer = await service.connect()
        writer.write(start)
        for _ in range(int(HEAD_S)):
            assert service.state.connections
            writer.write(more)
            await skip(1.0)
        assert await status_and_end(reader) == 408
        await skip(DISCARDED_S)
        assert not service.state.connections

    on_wire(talk)


def test_a_connection_that_says_nothing_ends_without_an_answer() -> None:
    async def talk(service: Service) -> None:
        reader, _ = await service.connect()
        await skip(HEAD_S)
        assert await reader.read() == b""

    on_wire(talk)


def test_the_next_head_of_a_connection_has_the_same_limits() -> None:
    async def talk(service: Service) -> None:
        for more, after_s, status in ((b"a: b\r\n" * 20_000, 0.0, 431), (b"a", HEAD_S, 408)):
            streams = await service.connect()
            streams[1].write(GET + b"\r\n")
            await echoed(streams)
            streams[1].write(GET + more)
            while streams[1].transport.get_write_buffer_size():
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            await skip(after_s)
            assert await status_and_end(streams[0]) == status

    on_wire(talk)


def test_an_answer_under_way_goes_out_before_the_connection_ends() -> None:
    """A request that is whole is answered, however bad what follows it is."""

    async def talk(service: Service) -> None:
        for junk in (b"\0" * 10, GET + b"a: b\r\n" * 30_000, (GET + b"\r\n") * (MAX_PIPELINED + 2)):
            service.go_on.clear()
            service.started.clear()
            streams = await service.connect()
            streams[1].write(GET.replace(b"/", b"/slow", 1) + b"\r\n")
            await service.started.wait()
            streams[1].write(junk)
            await asyncio.sleep(0.02)
            service.go_on.set()
            assert await echoed(streams) == {"body": "", "headers": 1}
            assert await status_and_end(streams[0]) == 0

    on_wire(talk)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def talk(service: Service) -> None:
        streams = await service.connect()
        posts = [b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 1\r\n\r\n%d" % number for number in range(9)]
        streams[1].write(b"".join(posts))
        assert [(await echoed(streams))["body"] for _ in posts] == [str(number) for number in range(9)]

    on_wire(talk)


def test_a_body_that_nobody_reads_ends_in_time() -> None:
    async def talk(service: Service) -> None:
        streams = await service.connect()
        streams[1].write(b"POST /deaf HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\nx")
        await echoed(streams)
        for _ in range(int(UNREAD_BODY_S / 4)):
            assert service.state.connections
            streams[1].write(b"x")
            await skip(4.0)
        assert await streams[0].read() == b""

    on_wire(talk)


def test_a_refused_caller_may_send_only_a_little_more() -> None:
    async def talk(service: Service) -> None:
        reader, writer = await service.connect()
        writer.write(GET + b"a: b\r\n" * ((HEAD_BYTES + 2 * DISCARDED_BYTES) // 6))
        assert await status_and_end(reader) in (0, 431)
        while service.state.connections:
            await asyncio.sleep(0)

    on_wire(talk)


def test_who_waits_longest_without_a_request_makes_room() -> None:
    async def talk(service: Service) -> None:
        busy = await service.connect()
        busy[1].write(GET.replace(b"/", b"/slow", 1) + b"\r\n")
        await service.started.wait()
        idle = [await service.connect() for _ in range(3)]
        for _ in range(20):
            new = await service.connect()
            new[1].write(GET + b"\r\n")
            assert (await echoed(new))["headers"] == 1
            assert len(service.state.connections) == 4
        assert [await reader.read() for reader, _ in idle] == [b""] * 3
        service.go_on.set()
        await echoed(busy)

    on_wire(talk, max_connections=4)


def test_where_all_connections_have_requests_a_new_one_is_told_to_come_back() -> None:
    async def talk(service: Service) -> None:
        busy = [await service.connect() for _ in range(4)]
        for _, writer in busy:
            service.started.clear()
            writer.write(GET.replace(b"/", b"/slow", 1) + b"\r\n")
            await service.started.wait()
        for _ in range(3):
            reader, writer = await service.connect()
            writer.write(GET + b"\r\n")
            assert await status_and_end(reader) == 503
            assert len(service.state.connections) == 5
        service.go_on.set()
        for streams in busy:
            await echoed(streams)

    on_wire(talk, max_connections=4)


def test_a_flood_of_header_lines_costs_neither_memory_nor_time(tmp_path: Path) -> None:
    """40 MB of lines took 800 MB, and everybody else waited."""
    with forked(tmp_path / "service.sqlite3") as (url, process):
        host, port = httpx.URL(url).host, httpx.URL(url).port or 0
        before_bytes = _resident_bytes(process.pid)
        with socket.create_connection((host, port), timeout=PATIENCE_S) as flood:
            flood.sendall(GET)
            with pytest.raises(ConnectionError):
                for _ in range(FLOOD_BYTES // 60_000):
                    flood.sendall(b"a: b\r\n" * 10_000)
            assert httpx.get(f"{url}/healthz", timeout=PATIENCE_S).status_code == 200
        assert _resident_bytes(process.pid) - before_bytes < 30 * 10**6


def _resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:
        raise LookupError(pid)
    return 1024 * int(found[1])
