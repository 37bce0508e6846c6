"""Load for a service: a closed loop on a number of connections, in a separate process that does as little as possible.

Reads its task as JSON on standard input, and writes its observations as JSON on standard output.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import count
from statistics import quantiles

WARM_UP = 0.1
"""The share of the requests that is sent before the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests, repeated in this order up to a total number."""

    port: int
    connections: int
    total: int
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Requests a second, the times that they took, what they answered, and how many bytes an answer had."""

    per_s: float
    p50_ms: float
    p99_ms: float
    statuses: dict[str, int]
    answer_bytes: int


def request(method: str, path: str, token: str | None = None, body: str | None = None) -> str:
    """A request in HTTP."""
    headers = ["Host: 127.0.0.1"]
    headers += [f"Authorization: Bearer {token}"] if token else []
    headers += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body is not None else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "", body or ""])


def sent_by(load: Load) -> int:
    """How many requests are sent, with those before the measurement."""
    return load.total + _before(load)


def run(load: Load) -> Seen:
    """Sends it from another process."""
    command = [sys.executable, "-m", "benchmarks.service_load"]
    done = subprocess.run(command, input=json.dumps(asdict(load)), capture_output=True, text=True, check=True)
    return Seen(**json.loads(done.stdout))


def _before(load: Load) -> int:
    return max(load.connections, int(load.total * WARM_UP))


@dataclass(slots=True)
class _Tally:
    requests: list[bytes]
    total: int
    numbers: "count[int]" = field(default_factory=count)
    times_s: list[float] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    answer_bytes: int = 0


class _Client(asyncio.Protocol):
    """Sends the next request as soon as the answer to the last one is whole."""

    def __init__(self, tally: _Tally) -> None:
        self._tally = tally
        self._missing_bytes = 0
        self._head = b""
        self._sent_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts."""
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        """Counts what has come."""
        if self._missing_bytes:
            self._missing_bytes -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, rest = self._head[:end].lower(), len(self._head) - end - 4
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            status = head[9:12].decode()
            self._tally.statuses[status] = self._tally.statuses.get(status, 0) + 1
            self._tally.answer_bytes += length
            self._missing_bytes = length - rest
            self._head = b""
        if not self._missing_bytes:
            self._tally.times_s.append(time.perf_counter() - self._sent_s)
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends."""
        if not self.done.done():
            self.done.set_result(None)

    def _next(self) -> None:
        number = next(self._tally.numbers)
        if number >= self._tally.total:
            self._transport.close()
            return
        self._sent_s = time.perf_counter()
        self._transport.write(self._tally.requests[number % len(self._tally.requests)])  # type: ignore[attr-defined]


async def _loop(load: Load, total: int) -> tuple[_Tally, float]:
    tally = _Tally(requests=[text.encode() for text in load.requests], total=total)
    loop = asyncio.get_running_loop()
    start_s = time.perf_counter()
    made = [
        await loop.create_connection(lambda: _Client(tally), "127.0.0.1", load.port) for _ in range(load.connections)
    ]
    await asyncio.gather(*(client.done for _, client in made))
    return tally, time.perf_counter() - start_s


async def _measured(load: Load) -> Seen:
    await _loop(load, _before(load))
    tally, elapsed_s = await _loop(load, load.total)
    hundredths = quantiles(tally.times_s, n=100)
    return Seen(
        per_s=len(tally.times_s) / elapsed_s,
        p50_ms=1e3 * hundredths[49],
        p99_ms=1e3 * hundredths[98],
        statuses=tally.statuses,
        answer_bytes=tally.answer_bytes // max(len(tally.times_s), 1),
    )


def main() -> None:
    """Does what standard input says."""
    import uvloop

    given = json.load(sys.stdin)
    load = Load(**{**given, "requests": tuple(given["requests"])})
    print(json.dumps(asdict(uvloop.run(_measured(load)))))


if __name__ == "__main__":
    main()
