"""Chaos: clients that send mixed requests until each is acknowledged, while services are killed and started again.

What was acknowledged is compared with what is in the database afterwards.
"""

import itertools
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from sqlalchemy import select

from pipeplan.documents.identity import canonical_json
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.platform.database import Database
from planner_service.platform.tables import jobs, profiles, runs
from tests.planner_service.examples import profile_document, request_document, run_task
from tests.planner_service.servers import PIPEPLAN, announced_url, environment
from tests.processes import free_port
from tests.waiting import PATIENCE_S

CLIENTS = 8
PAUSE_S = 0.05
MIX = ("profile", "run", "profile", "read", "run", "cancel", "profile", "read", "run", "read")
"""What a client asks for, one after the other."""

NOT_NOW = (429, 502, 503, 504)
JSON = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Service:
    """A service process that can be killed and started again under the same address."""

    database_url: str
    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it; returns when it answers."""
        command = [*PIPEPLAN, "serve", "--port", str(self.port), "--database", self.database_url]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment()
        )
        announced_url(self.process)
        threading.Thread(target=self.process.communicate, daemon=True).start()

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class Acknowledged:
    """What the clients were told is done, and how often they had to ask again."""

    profiles: list[str] = field(default_factory=list)
    runs: dict[str, str] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    requests: int = 0
    kills: int = 0
    repetitions: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """How the database differs from what was acknowledged: nothing, if all went well."""

    lost: tuple[str, ...]
    twice: tuple[str, ...]
    unfinished: tuple[str, ...]


class Storm:
    """The clients of some services, and what they were told."""

    def __init__(self, services: Sequence[Service], requests: int, plan_id: str) -> None:
        self.told = Acknowledged()
        self._services = services
        self._body = run_task(plan_id).model_dump_json()
        self._numbers = iter(range(requests))
        self._news = threading.Condition()
        self._failed = threading.Event()

    def run(self) -> None:
        """Sends all requests; returns when each is acknowledged. Raises AssertionError for an answer that is wrong."""
        start_s = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._work, seed) for seed in range(CLIENTS)]
        self.told.elapsed_s = time.monotonic() - start_s
        for client in clients:
            client.result()

    def wait_for(self, requests: int) -> bool:
        """Returns when so many requests are acknowledged; False where that takes far too long, or a client failed."""
        with self._news:
            self._news.wait_for(lambda: self.told.requests >= requests or self._failed.is_set(), timeout=PATIENCE_S)
            return self.told.requests >= requests

    def _work(self, seed: int) -> None:
        try:
            with httpx.Client(timeout=10.0, trust_env=False) as http:
                _Client(self, http, random.Random(seed)).work()
        except BaseException:
            with self._news:
                self._failed.set()
                self._news.notify_all()
            raise

    def next_number(self) -> int | None:
        """The next request's number; None where all are taken."""
        with self._news:
            return next(self._numbers, None)

    def done(self, kind: str, key: str, identity: str) -> None:
        """A request is acknowledged."""
        with self._news:
            if kind == "profile":
                self.told.profiles.append(identity)
            elif kind == "run":
                self.told.runs[key] = identity
            elif kind == "cancel":
                self.told.cancelled.append(identity)
            self.told.requests += 1
            self._news.notify_all()

    def again(self, reason: str) -> None:
        """A request is sent again."""
        with self._news:
            self.told.repetitions[reason] += 1

    def address(self, choice: random.Random) -> str:
        """A service, whichever."""
        return choice.choice(self._services).url

    @property
    def body(self) -> str:
        """What a run is asked for with."""
        return self._body


class _Client:
    def __init__(self, storm: Storm, http: httpx.Client, choice: random.Random) -> None:
        self._storm = storm
        self._http = http
        self._choice = choice
        self._jobs: list[str] = []
        self._seen: list[str] = []

    def work(self) -> None:
        while (number := self._storm.next_number()) is not None:
            kind = MIX[number % len(MIX)]
            getattr(self, f"_{kind}")(number)

    def _profile(self, number: int) -> None:
        document = canonical_json(profile_document(model={"name": f"model {number}"}))
        identity = self._send("POST", "/v1/profiles", document)["id"]
        self._seen.append(f"/v1/profiles/{identity}")
        self._storm.done("profile", "", identity)

    def _run(self, number: int) -> None:
        key = f"request {number}"
        job = self._send("POST", "/v1/jobs", self._storm.body, {"Idempotency-Key": key})
        self._jobs.append(job["id"])
        self._seen.append(f"/v1/runs/{job['run_id']}")
        self._storm.done("run", key, job["id"])

    def _cancel(self, number: int) -> None:
        if not self._jobs:
            return self._run(number)
        job_id = self._jobs.pop(self._choice.randrange(len(self._jobs)))
        assert self._send("POST", f"/v1/jobs/{job_id}/cancel")["state"] == "cancelled"
        return self._storm.done("cancel", "", job_id)

    def _read(self, number: int) -> None:
        """What was acknowledged to this client is there, whichever service it asks."""
        if not self._seen:
            return self._profile(number)
        self._send("GET", self._choice.choice(self._seen))
        return self._storm.done("read", "", "")

    def _send(self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> Any:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            url = self._storm.address(self._choice) + path
            try:
                answer = self._http.request(method, url, content=body, headers={**JSON, **(headers or {})})
            except httpx.TransportError as error:
                self._storm.again(type(error).__name__)
            else:
                if answer.status_code not in NOT_NOW:
                    assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
                    return answer.json()
                assert "retry-after" in answer.headers, answer.text
                self._storm.again(str(answer.status_code))
            time.sleep(PAUSE_S)
        raise AssertionError(f"{method} {path} is not answered")


def endure(database_url: str, *, requests: int, kills: int, services: int = 1) -> Acknowledged:
    """Sends the requests, and kills one of the services after every same share of them."""
    with _running(database_url, services) as started:
        storm = Storm(started, requests, _plan(started[0].url))
        with ThreadPoolExecutor(1) as pool:
            clients = pool.submit(storm.run)
            _kill_in_turn(storm, started, requests, kills)
            clients.result()
    return storm.told


def _kill_in_turn(storm: Storm, services: Sequence[Service], requests: int, kills: int) -> None:
    for number, service in zip(range(1, kills + 1), itertools.cycle(services), strict=False):
        if not storm.wait_for(number * requests // (kills + 1)):
            return
        service.kill()
        service.start()
        storm.told.kills += 1


def compare(database_url: str, told: Acknowledged) -> Findings:
    """What the database holds beside what was acknowledged. Every request came to be acknowledged in the end."""
    database = Database(database_url)
    with database.read() as connection:
        stored_profiles = list(connection.execute(select(profiles.c.id)).scalars())
        stored_jobs = connection.execute(select(jobs.c.id, jobs.c.state).where(jobs.c.kind == "run")).all()
        stored_runs = list(connection.execute(select(runs.c.job_id)).scalars())
    database.close()
    states = {row.id: row.state for row in stored_jobs}
    own = {*told.runs.values()}
    return Findings(
        lost=tuple(sorted(({*told.profiles} - {*stored_profiles}) | (own - {*states}) | (own - {*stored_runs}))),
        twice=tuple(sorted({*states} - own)) + tuple(k for k, n in Counter(told.runs.values()).items() if n > 1),
        unfinished=tuple(job_id for job_id in told.cancelled if states.get(job_id) != "cancelled"),
    )


@contextmanager
def _running(database_url: str, services: int) -> Iterator[list[Service]]:
    with ExitStack() as stack:
        started = [Service(database_url, free_port()) for _ in range(services)]
        for service in started:
            stack.callback(service.kill)
            service.start()
        yield started


def _plan(url: str) -> str:
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        for path, document in (("/v1/profiles", PROFILE), ("/v1/clusters", CLUSTER)):
            http.post(path, content=canonical_json(document), headers=JSON).raise_for_status()
        plan_id: str = http.post("/v1/plans", json=request_document()).raise_for_status().json()["id"]
        return plan_id
