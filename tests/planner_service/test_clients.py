"""Both clients: errors come back as they were raised, and an agent's last word is repeated until it is taken."""

import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from pipeplan.client.client import Client
from pipeplan.client.connection import RetryClock
from pipeplan.documents.plan import Infeasible, Plan
from pipeplan.errors import ConflictError, InvalidInputError, LeaseLostError, NotFoundError, ServiceError
from pipeplan.protocol.jobs import Job, Lease, LeaseRequest, Progress
from pipeplan.protocol.problems import problem_of
from pipeplan.protocol.runs import RunQuery
from planner_service.overview.openapi import CLUSTER, PLAN_REQUEST, PROFILE
from tests.planner_service.examples import PROFILE_RESULT, PROFILE_TASK, run_result, run_task
from tests.planner_service.reporting import complete, fail
from tests.planner_service.servers import served
from worker_agent.agent.client import AgentClient

MOMENT = datetime(2026, 1, 2, tzinfo=UTC)
JOB = Job(id="j", task=PROFILE_TASK, state="succeeded", attempts=1, created_at=MOMENT, updated_at=MOMENT)
LEASE = Lease(job=JOB, token="t", expires_in_s=30.0)


class _Unsteady:
    """A service that is out of reach, then starting, then there; and the time that passes meanwhile."""

    def __init__(self, *, failures: int) -> None:
        self.requests = 0
        self.slept_s = 0.0
        self._failures = failures

    def answer(self, _request: httpx.Request) -> httpx.Response:
        """What the next request gets."""
        self.requests += 1
        if self.requests > self._failures:
            return httpx.Response(200, text=JOB.model_dump_json())
        if self.requests % 2:
            raise httpx.ConnectError("refused")
        return httpx.Response(503, text=problem_of(ServiceError("starting")).model_dump_json())

    def sleep(self, duration_s: float) -> None:
        """Lets time pass."""
        self.slept_s += duration_s

    def agent(self) -> AgentClient:
        """An agent that talks to it."""
        clock = RetryClock(now_s=lambda: self.slept_s, sleep=self.sleep)
        transport = httpx.MockTransport(self.answer)
        return AgentClient("http://127.0.0.1:1", transport=transport, clock=clock, patience_s=60.0)


@pytest.mark.campaign
def test_the_main_job_through_the_clients(tmp_path: Path) -> None:
    with served(tmp_path / "service.sqlite3") as url:
        service, agent = Client(url), AgentClient(url)
        service.create_profile(PROFILE)
        service.create_cluster(CLUSTER)
        created = service.create_plan(PLAN_REQUEST)
        assert isinstance(created.answer, Plan)
        plan_id = str(created.plan_id)
        assert service.plan(plan_id) == agent.plan(plan_id) == created.answer
        assert next(service.plans()).id == plan_id
        assert service.plan_timeline(plan_id, batches=3).batches == 3
        assert len(service.plan_streams(plan_id).streams) == created.answer.workers
        job = service.enqueue_job(run_task(plan_id), idempotency_key="k")
        assert service.enqueue_job(run_task(plan_id), idempotency_key="k").id == job.id
        thread = threading.Thread(target=_work, args=(agent, created.answer))
        thread.start()
        seen: list[Job] = []
        done = service.wait_for_job(job.id, on_progress=seen.append, timeout_s=30)
        thread.join()
        assert done.state == seen[-1].state == "succeeded"
        run = service.run(str(done.run_id))
        assert run.report == run_result(created.answer).report
        assert service.run_timeline(run.id) == run_result(created.answer).timeline.timeline()
        assert next(service.runs(RunQuery(plan_id=plan_id))).measured_samples_per_s == 48.0
        assert "measured" in service.run_trace(run.id)
        assert agent.lease(LeaseRequest(agent="node-1")) is None
        agent.close()
        _check_errors(service, job)
        service.close()


def _work(agent: AgentClient, plan: Plan) -> None:
    lease = agent.lease(LeaseRequest(agent="node-1"))
    if lease is not None:
        agent.heartbeat(lease, Progress(done=1, total=4))
        complete(agent, lease, run_result(plan))


def _check_errors(service: Client, ended: Job) -> None:
    tiny = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=1000))
    request = PLAN_REQUEST.model_copy(update={"cluster_id": service.create_cluster(tiny).id})
    refused = service.create_plan(request)
    assert isinstance(refused.answer, Infeasible)
    assert refused.plan_id is None
    with pytest.raises(NotFoundError, match="there is no plan x"):
        service.plan("x")
    with pytest.raises(ConflictError):
        service.cancel_job(ended.id)
    with pytest.raises(InvalidInputError) as caught:
        service.create_plan(PLAN_REQUEST.model_copy(update={"planner": "magic"}))
    assert (caught.value.field, caught.value.value) == ("planner", "magic")


def test_an_agents_result_is_sent_again_until_the_service_is_back() -> None:
    service = _Unsteady(failures=6)
    assert complete(service.agent(), LEASE, PROFILE_RESULT).id == "j"
    assert service.requests == 7
    assert 0 < service.slept_s < 60


def test_patience_ends(tmp_path: Path) -> None:
    service = _Unsteady(failures=10**6)
    with pytest.raises(ServiceError):
        fail(service.agent(), LEASE, "x" * 4000)
    assert 50 < service.slept_s <= 60
    assert service.requests < 30


def test_what_is_not_the_last_word_is_sent_once() -> None:
    service = _Unsteady(failures=6)
    with pytest.raises(ServiceError, match="cannot be reached"):
        service.agent().lease(LeaseRequest(agent="a"))
    assert service.requests == 1


def test_a_lost_lease_is_not_sent_again() -> None:
    requests = []

    def refuse(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(409, text=problem_of(LeaseLostError("gone")).model_dump_json())

    with pytest.raises(LeaseLostError, match="gone"):
        complete(AgentClient("http://127.0.0.1:1", transport=httpx.MockTransport(refuse)), LEASE, PROFILE_RESULT)
    assert len(requests) == 1


def test_an_answer_that_is_no_problem_document_is_a_service_error() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(502, text="<html>Bad gateway</html>"))
    with pytest.raises(ServiceError, match="502 Bad Gateway"):
        AgentClient("http://127.0.0.1:1", transport=transport).plan("x")


@pytest.mark.parametrize("url", ["127.0.0.1:8437", "ftp://x", "http://", ""])
def test_an_address_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="url: must be a URL"):
        Client(url)
