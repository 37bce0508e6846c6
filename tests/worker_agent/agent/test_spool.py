"""The spool: what a job came to reaches the service, once, whatever happens to either of them meanwhile."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from pipeplan.client.connection import RetryClock
from pipeplan.errors import LeaseLostError
from pipeplan.protocol.jobs import Job, Lease, LinksResult, LinksTask
from planner_service.app import create_app
from planner_service.jobs import store as jobs
from planner_service.jobs.store import Taking
from planner_service.overview.openapi import CLUSTER
from planner_service.platform.context import Context
from planner_service.platform.settings import Settings
from worker_agent.agent.client import AgentClient
from worker_agent.agent.spool import Spool, SpooledReport, completion, failure, new_report_id

RESULT = LinksResult(cluster=CLUSTER)
REPORTS = 1000
OUTAGE_S = 3600.0
POLL_S = 30.0


class Time:
    """The moment, for the service and for the agent; sleeping passes it at once."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, duration_s: float) -> None:
        """Lets time pass."""
        self.now_s += duration_s

    def moment(self) -> datetime:
        """As the service reads it."""
        return datetime(2026, 1, 2, tzinfo=UTC) + timedelta(seconds=self.now_s)


class Faulty(httpx.BaseTransport):
    """Hands requests to an application, while it is there; of those, a fifth is lost, before it arrives or after."""

    def __init__(self, service: TestClient, time: Time) -> None:
        self._service = service
        self._time = time
        self._chance = random.Random(5)
        self.away_until_s = 0.0
        self.faults = False
        self.lost_answers = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answers, or does not."""
        if self._time.now_s < self.away_until_s:
            raise httpx.ConnectError("[Errno 111] Connection refused", request=request)
        fault = self._chance.choice(("request", "answer", "busy")) if self._fails() else None
        if fault == "request":
            raise httpx.ConnectTimeout("lost on its way", request=request)
        if fault == "busy":
            return httpx.Response(503)
        path = request.url.raw_path.decode()
        answer = self._service.request(
            request.method, path, content=request.read(), headers={"Content-Type": "application/json"}
        )
        if fault == "answer":
            self.lost_answers += 1
            raise httpx.ReadError("the answer was lost", request=request)
        return httpx.Response(answer.status_code, content=answer.content)

    def _fails(self) -> bool:
        return self.faults and self._chance.random() < 0.2


@pytest.fixture
def time() -> Time:
    """The moment."""
    return Time()


@pytest.fixture
def service(tmp_path: Path, time: Time) -> Iterator[TestClient]:
    """The real application, whose rate of requests is not limited."""
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'service.sqlite3'}")
    with TestClient(create_app(settings, now=time.moment), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def transport(service: TestClient, time: Time) -> Faulty:
    """The way to it."""
    return Faulty(service, time)


@pytest.fixture
def client(transport: Faulty, time: Time) -> Iterator[AgentClient]:
    """An agent's client on that way."""
    clock = RetryClock(now_s=lambda: time.now_s, sleep=time.sleep)
    with AgentClient("http://127.0.0.1", transport=transport, clock=clock) as client:
        yield client


def _leases(service: TestClient, count: int) -> list[Lease]:
    """So many jobs that an agent holds, in one transaction."""
    context: Context = service.app.state.context  # type: ignore[attr-defined]
    now = context.now()
    found = []
    with context.database.write() as connection:
        for number in range(count):
            job_id, token = f"{number:032x}", f"token-{number}"
            jobs.add(connection, job_id=job_id, task=LinksTask(devices=1), now=now)
            expires_at = now + timedelta(seconds=30)
            taking = Taking(agent="node-1", instance=None, token=token, now=now, expires_at=expires_at)
            job = jobs.take(connection, (number + 1,), taking)
            found += [Lease(job=job, token=token, expires_in_s=30.0)] if job is not None else []
    return found


def _job(service: TestClient, lease: Lease) -> Job:
    return Job.model_validate_json(service.get(f"/v1/jobs/{lease.job.id}").content)


def _ignore(_line: str) -> None:
    pass


def _complete(spool: Spool, lease: Lease) -> None:
    report_id = new_report_id()
    spool.add(completion(lease, RESULT, report_id), report_id)


@pytest.mark.campaign
def test_after_an_hours_outage_and_with_faults_a_thousand_reports_arrive_exactly_once(
    tmp_path: Path, service: TestClient, transport: Faulty, client: AgentClient, time: Time
) -> None:
    leases = _leases(service, REPORTS)
    transport.away_until_s, transport.faults = OUTAGE_S, True
    for number, lease in enumerate(leases):
        spool = Spool(tmp_path / "spool")  # of a new agent every time: what counts is on the disk
        _complete(spool, lease)
        if number % 100 == 0:
            assert not spool.deliver(client.report, _ignore)
    assert len(spool.pending()) == REPORTS == len(leases)
    tries = 0
    while not spool.deliver(client.report, _ignore):
        time.sleep(POLL_S if time.now_s < OUTAGE_S else 1.0)
        tries += 1
        assert tries < 10_000
    assert time.now_s >= OUTAGE_S
    assert transport.lost_answers > 20
    context: Context = service.app.state.context  # type: ignore[attr-defined]
    with context.database.read() as connection:
        ended = connection.exec_driver_sql("SELECT state, count(*) FROM jobs GROUP BY state").all()
        told = connection.exec_driver_sql("SELECT count(*) FROM events WHERE kind = 'succeeded'").scalar_one()
        taken = connection.exec_driver_sql("SELECT count(*), count(DISTINCT job_id) FROM reports").one()
    assert [tuple(row) for row in ended] == [("succeeded", REPORTS)]
    assert told == REPORTS
    assert tuple(taken) == (REPORTS, REPORTS)


def test_reports_are_whole_or_not_there_and_are_delivered_in_their_order(tmp_path: Path) -> None:
    spool, sent = Spool(tmp_path), list[str]()
    for number in range(3):
        spool.add(SpooledReport(job_id="j", path=f"/{number}", body="{}"), new_report_id())
    (tmp_path / "00000000000000000000000000-half.part").write_text('{"job_id"')

    def send(path: str, _body: str) -> None:
        sent.append(path)

    assert Spool(tmp_path).deliver(send, _ignore)
    assert sent == ["/0", "/1", "/2"]
    assert spool.pending() == []
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*.json"))


@pytest.mark.parametrize("content", ["not JSON", ""])
def test_what_cannot_be_read_or_is_refused_is_put_aside_and_holds_nothing_up(tmp_path: Path, content: str) -> None:
    spool, sent, said = Spool(tmp_path), list[str](), list[str]()
    (tmp_path / "00000000000000000000000001-torn.json").write_text(content)
    for path in ("/late", "/next"):
        spool.add(SpooledReport(job_id="j", path=path, body="{}"), new_report_id())

    def send(path: str, _body: str) -> None:
        if path == "/late":
            raise LeaseLostError("its lease has passed on")
        sent.append(path)

    assert spool.deliver(send, said.append)
    assert sent == ["/next"]
    assert len(list((tmp_path / "refused").glob("*.json"))) == 2
    assert "passed on" in said[1]


def test_a_report_that_was_spooled_before_the_agent_died_is_taken_after_its_restart(
    tmp_path: Path, service: TestClient, transport: Faulty, client: AgentClient, time: Time
) -> None:
    (lease,) = _leases(service, 1)
    transport.away_until_s = OUTAGE_S
    report_id = new_report_id()
    Spool(tmp_path / "spool").add(failure(lease, "out of memory", report_id), report_id)
    time.now_s = OUTAGE_S
    assert Spool(tmp_path / "spool").deliver(client.report, _ignore)
    assert (_job(service, lease).state, _job(service, lease).error) == ("failed", "out of memory")
