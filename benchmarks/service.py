"""The service under load: requests a second and their times, with tokens demanded, beside a plain FastAPI application.

    python -m benchmarks.service

Fixed work on one machine: the load generator, the service and nothing else. 100,000 plans are in the table.
"""

import compileall
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipeplan
import planner_service
from benchmarks.idle import busy_cores
from benchmarks.service_database import PLANNERS, fill
from benchmarks.service_load import Load, Seen, request, run, sent_by

PLANS = 100_000
CONNECTIONS = 16
ROUNDS = 3
HOT = 100
SUMMARIES = tuple(f"/v1/plans?planner={planner}" for planner in PLANNERS)
PEERS_SUMMARIES = tuple(f"/v1/summaries?planner={planner}" for planner in PLANNERS)
LIST = "/v1/plans?content=true&limit=50&planner=gpipe&sort=-throughput"
PIPEPLAN = (sys.executable, "-c", "from pipeplan.cli.app import main; main()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running one: its port and its process."""

    port: int
    process: subprocess.Popen[str]
    ready_s: float

    @property
    def resident_bytes(self) -> int:
        """The memory that it and all its processes hold now."""
        told = subprocess.run(["ps", "-eo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True)
        rows = [tuple(map(int, line.split())) for line in told.stdout.splitlines()]
        family = {self.process.pid}
        while more := {pid for pid, parent, _ in rows if parent in family} - family:
            family |= more
        return 1024 * sum(kib for pid, _, kib in rows if pid in family)

    @property
    def used_s(self) -> float:
        """The processor time that it has used so far, without the processes that it has started."""
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The round with the most requests a second, and the least processor time that a request took in any."""

    seen: Seen
    cpu_ms: float


@contextmanager
def serving(database: Path, program: tuple[str, ...] = PIPEPLAN) -> Iterator[Server]:
    """The service on the database, demanding tokens; its log goes to a file, each request in it."""
    environment = os.environ | {"PIPEPLAN_REQUIRE_TOKENS": "true", "PIPEPLAN_LOG_FORMAT": "json"}
    command = [*program, "serve", "--port", "0", "--database", f"sqlite:///{database}"]
    log = database.with_suffix(".log")
    start_s = time.perf_counter()
    with log.open("w") as written, subprocess.Popen(command, stderr=written, env=environment, text=True) as process:
        try:
            port = _announced_port(log, process)
            yield Server(port=port, process=process, ready_s=time.perf_counter() - start_s)
        finally:
            process.terminate()


@contextmanager
def serving_peer(database: Path) -> Iterator[Server]:
    """The peer, one process on uvloop and httptools."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "benchmarks.service_peer:app", "--port", str(port), "--no-access-log"]
    environment = os.environ | {"PEER_DATABASE": str(database)}
    start_s = time.perf_counter()
    with subprocess.Popen(command, env=environment, text=True, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json")
                    break
                except OSError:
                    time.sleep(0.05)
            yield Server(port=port, process=process, ready_s=time.perf_counter() - start_s)
        finally:
            process.terminate()


def compile_modules() -> None:
    """Compiles the service's modules, as an installation does: the time of a start must not include this."""
    for package in (pipeplan, planner_service):
        compileall.compile_dir(package.__path__[0], quiet=1)


def make_token(database: Path) -> str:
    """A token with all scopes."""
    command = [*PIPEPLAN, "token", "create", "--name", "bench", "--scope", "admin", "--scope", "plan"]
    done = subprocess.run(
        [*command, "--scope", "agent", "--database", f"sqlite:///{database}", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return str(json.loads(done.stdout)["token"])


def best(server: Server, load: Load) -> Best:
    """The best of several rounds: other programs can only slow them down."""
    rounds, cpu_ms = [], []
    for _ in range(ROUNDS):
        before_s = server.used_s
        rounds.append(run(load))
        cpu_ms.append(1e3 * (server.used_s - before_s) / sent_by(load))
    return Best(seen=max(rounds, key=lambda seen: seen.per_s), cpu_ms=min(cpu_ms))


def leased_jobs(server: Server, token: str, count: int) -> list[str]:
    """Heartbeats with progress of as many jobs as there are connections: what agents report, each on the disk."""
    task = {"kind": "profile", "model": "hf:gpt2?n_layer=4", "microbatch_sizes": [1]}
    reports = []
    for index in range(count):
        _ask(server, token, "POST", "/v1/jobs", task)
        lease = _ask(server, token, "POST", "/v1/jobs/lease", {"agent": f"node-{index}"})
        progress = {"done": index, "total": 100, "message": "block 3 of 10"}
        body = json.dumps({"token": lease["token"], "progress": progress})
        reports.append(request("POST", f"/v1/jobs/{lease['job']['id']}/heartbeat", token, body))
    return reports


def _ask(server: Server, token: str, method: str, path: str, body: object) -> dict[str, Any]:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}",
        method=method,
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked) as answer:
        read: dict[str, Any] = json.load(answer)
        return read


def _announced_port(log: Path, process: "subprocess.Popen[str]") -> int:
    while process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
        if found:
            return int(found[1])
        time.sleep(0.01)
    raise LookupError(log.read_text())


def _row(name: str, ours: Best, peer: Best | None) -> None:
    cells = [name, f"{ours.seen.answer_bytes:,}"]
    for one in (ours, peer):
        cells += (
            ["", "", ""] if one is None else [f"{one.seen.per_s:,.0f}", f"{one.seen.p99_ms:.1f}", f"{one.cpu_ms:.2f}"]
        )
    cells.append("" if peer is None else f"{peer.cpu_ms / ours.cpu_ms:.1f}")
    print(f"| {' | '.join(cells)} |", flush=True)
    unexpected = set(ours.seen.statuses) - {"200"}
    if unexpected:
        print(f"unexpected answers: {ours.seen.statuses}")


def main() -> None:
    """Prints the table."""
    print(f"{busy_cores():.2f} cores busy with other things before\n")
    compile_modules()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "service.sqlite3"
        ids = fill(database, PLANS)
        token = make_token(database)
        hot = tuple(f"/v1/plans/{plan_id}" for plan_id in ids[:: len(ids) // HOT])
        cold = tuple(f"/v1/plans/{plan_id}" for plan_id in ids[::10])
        with serving(database) as server:
            time.sleep(2)
            print(f"ready after {server.ready_s:.2f} s, idle at {server.resident_bytes / 2**20:.0f} MiB\n")
            reports = Load(
                port=server.port,
                connections=CONNECTIONS,
                total=2_000,
                requests=tuple(leased_jobs(server, token, CONNECTIONS)),
            )
            gets = best(server, _gets(server, hot, 20_000, token))
            others = best(server, _gets(server, cold, len(cold), token))
            summaries = best(server, _gets(server, SUMMARIES, 2_000, token))
            lists = best(server, _gets(server, (LIST,), 2_000, token))
            written = best(server, reports)
        with serving_peer(database) as peer:
            peers_gets = best(peer, _gets(peer, hot, 2_000))
            peers_summaries = best(peer, _gets(peer, PEERS_SUMMARIES, 200))
            peers_lists = best(peer, _gets(peer, (LIST,), 100))
    print("| | bytes | requests/s | p99 ms | CPU ms | peer's requests/s | p99 ms | CPU ms | ratio of CPU |")
    print("|---|---|---|---|---|---|---|---|---|")
    _row(f"a plan, one of {HOT} that are kept ready", gets, peers_gets)
    _row("a plan, each time another one", others, peers_gets)
    _row("50 summaries of a planner, the newest first", summaries, peers_summaries)
    _row("50 whole plans of a planner, the fastest first", lists, peers_lists)
    _row("a report, on the disk when it is answered", written, None)


def _gets(server: Server, paths: tuple[str, ...], total: int, token: str | None = None) -> Load:
    requests = tuple(request("GET", path, token) for path in paths[:total])
    return Load(port=server.port, connections=CONNECTIONS, total=total, requests=requests)


if __name__ == "__main__":
    main()
