"""The service's process while the worst bodies come in: /healthz, asked all along from another process.

    python -m benchmarks.bodies [--largest-mib 64]

Every route that takes a body is sent bodies of every kind, as large as it takes, one after the other; then many at
once; then what names the largest profile, which a short request may do. The first row is the same service with nothing
to do: what a shared machine does to the figures stands there. The peer is a plain FastAPI application that is sent the
clusters.
"""

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bodies_poll import Seen
from benchmarks.bodies_worst import VALID, Body, bodies_of
from benchmarks.idle import busy_cores
from benchmarks.service import Server, make_token, serving, serving_peer

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
IDLE_S = 5.0
AT_ONCE = 8
MANY = 200
FEW = 24
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route that takes a body, and the body's limit."""

    method: str
    path: str
    most_bytes: int


class Poll:
    """Another process that requests /healthz repeatedly."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.bodies_poll", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seen()

    def seen(self) -> Seen:
        """Its observations since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Seen(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


@contextmanager
def _polling(server: Server) -> Iterator[Poll]:
    poll = Poll(server.port)
    try:
        yield poll
    finally:
        poll.close()


def routes(server: Server, token: str, largest_bytes: int) -> list[Route]:
    """The routes of the description, and the login, which is not in it."""
    status, answer = _send(server, token, Route(method="GET", path="/openapi.json", most_bytes=0), b"")
    if status != 200:
        raise LookupError(answer)
    found = [
        Route(method=method.upper(), path=path, most_bytes=min(operation["x-max-body-bytes"], largest_bytes))
        for path, operations in json.loads(answer)["paths"].items()
        for method, operation in operations.items()
        if "requestBody" in operation
    ]
    return [*found, Route(method="POST", path="/login", most_bytes=8 * 1024)]


def _send(server: Server, token: str, route: Route, content: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    path = route.path.replace("{job_id}", "0" * 32).replace("{agent_id}", "node").replace("{name}", "a")
    kind = FORM if path == "/login" else JSON
    headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
    if path == "/login":
        headers["Origin"] = f"http://127.0.0.1:{server.port}"
    try:
        connection.request(route.method, path, body=content, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (BrokenPipeError, ConnectionResetError, TimeoutError):
        return 0, b""  # refused before all of it was sent, or not answered within PATIENCE_S
    finally:
        connection.close()


def _row(name: str, size_bytes: int, statuses: Counter[int], slowest_s: float, seen: Seen, worst: str) -> None:
    told = ", ".join(f"{status or 'none'}: {count}" for status, count in sorted(statuses.items()))
    print(
        f"| {name} | {size_bytes:,} | {told} | {slowest_s:.2f} |"
        f" {seen.p50_ms:.1f} | {seen.p99_ms:.1f} | {seen.worst_ms:.0f} | {worst} |",
        flush=True,
    )


def _one_by_one(server: Server, token: str, route: Route, poll: Poll, name: str = "") -> None:
    statuses: Counter[int] = Counter()
    every: list[Seen] = []
    slowest_s, worst = 0.0, ""
    for body in bodies_of(route.path, route.most_bytes):
        poll.seen()
        start_s = time.perf_counter()
        status, _ = _send(server, token, route, body.content)
        slowest_s = max(slowest_s, time.perf_counter() - start_s)
        statuses[status] += 1
        seen = poll.seen()
        if seen.worst_ms > max((one.worst_ms for one in every), default=0.0):
            worst = body.kind
        every.append(seen)
    _row(name or f"{route.method} {route.path}", route.most_bytes, statuses, slowest_s, Seen.of(every), worst)


def _at_once(
    server: Server, token: str, route: Route, bodies: list[Body], total: int, poll: Poll, which: str = ""
) -> None:
    poll.seen()
    start_s = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        sent = [pool.submit(_send, server, token, route, bodies[n % len(bodies)].content) for n in range(total)]
        statuses = Counter(one.result()[0] for one in sent)
    elapsed_s = time.perf_counter() - start_s
    name = f"{total} to {route.path}{which}, {AT_ONCE} at once"
    _row(name, max(len(body.content) for body in bodies), statuses, elapsed_s, poll.seen(), "")


def _names_the_largest(server: Server, token: str, largest_bytes: int, poll: Poll) -> None:
    """Asks for plans of the largest stored profile, then for its page."""
    profile, cluster = VALID["/v1/profiles"](largest_bytes), VALID["/v1/clusters"](1000)
    stored = [_stored(server, token, path, body) for path, body in (("profiles", profile), ("clusters", cluster))]
    asked = {"profile_id": stored[0], "cluster_id": stored[1], "planner": "gpipe", "batch_size": 1}
    plan = Body(kind="plan", content=json.dumps(asked).encode())
    which = ", which name the largest profile"
    _at_once(server, token, Route(method="POST", path="/v1/plans", most_bytes=0), [plan], FEW, poll, which)
    page = Route(method="GET", path=f"/profiles/{stored[0]}", most_bytes=0)
    _at_once(server, token, page, [Body(kind="nothing", content=b"")], FEW, poll)


def _stored(server: Server, token: str, noun: str, content: bytes) -> str:
    _, answer = _send(server, token, Route(method="POST", path=f"/v1/{noun}", most_bytes=0), content)
    stored: str = json.loads(answer)["id"]
    return stored


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest-mib", type=int, default=64)
    largest_bytes = parser.parse_args().largest_mib * 2**20
    print(f"{busy_cores():.2f} cores busy with other things before\n")
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "service.sqlite3"
        token = make_token(database)
        with serving(database) as server, _polling(server) as poll:
            print("| route | bytes | answers | slowest s | /healthz p50 ms | p99 ms | worst ms | during |")
            print("|---|---|---|---|---|---|---|---|")
            time.sleep(IDLE_S)
            _row("idle", 0, Counter(), 0.0, poll.seen(), "")
            every = routes(server, token, largest_bytes)
            for route in every:
                _one_by_one(server, token, route, poll)
            clusters = next(route for route in every if route.path == "/v1/clusters")
            small = [body for body in bodies_of(clusters.path, 64 * 1024) if len(body.content) <= 64 * 1024]
            _at_once(server, token, clusters, small, MANY, poll)
            _at_once(server, token, clusters, list(bodies_of(clusters.path, clusters.most_bytes)), MANY, poll)
            profiles = next(route for route in every if route.path == "/v1/profiles")
            _at_once(server, token, profiles, list(bodies_of(profiles.path, largest_bytes // 8)), FEW, poll)
            _names_the_largest(server, token, largest_bytes, poll)
        with serving_peer(database) as peer, _polling(peer) as poll:
            small_ones = Route(method="POST", path=clusters.path, most_bytes=64 * 1024)
            _one_by_one(peer, token, small_ones, poll, "the peer, clusters of 64 KiB, one by one")


if __name__ == "__main__":
    main()
