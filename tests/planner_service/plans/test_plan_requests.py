"""Asking for a plan: within a deadline, in a bounded queue, or as a job."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse, parse_plan
from pipeplan.documents.named_clusters import named_cluster
from pipeplan.documents.plan import Answer
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import PlanningProblem
from planner_service.app import create_app
from planner_service.overview.openapi import CLUSTER
from planner_service.plans.routes import Preference, preference_of
from planner_service.platform.context import Solve
from planner_service.platform.settings import Settings
from tests.planner_service.answers import halve
from tests.planner_service.examples import profile_document, request_document
from tests.waiting import PATIENCE_S


@contextmanager
def _service(database_url: str, solve: Solve, **settings: Any) -> Iterator[TestClient]:
    """A service with the examples' profile and cluster, and this planner."""
    app = create_app(Settings(database_url=database_url, **settings), solve=solve)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as http:
        http.post("/v1/profiles", json=profile_document())
        http.post("/v1/clusters", json=asdict(CLUSTER))
        yield http


class Gate:
    """A planner that answers once it is let."""

    def __init__(self) -> None:
        self.asked, self.opened = threading.Semaphore(0), threading.Event()

    def __call__(self, planner: str, problem: PlanningProblem) -> Answer:
        """Waits."""
        self.asked.release()
        self.opened.wait()
        return halve(planner, problem)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opened at the end, whatever the test does."""
    made = Gate()
    yield made
    made.opened.set()


def test_a_planner_beyond_the_deadline_is_a_504_that_says_how_to_ask_instead(database_url: str, gate: Gate) -> None:
    with _service(database_url, gate, solve_deadline_s=0.1) as http:
        answer = http.post("/v1/plans", json=request_document())
        gate.opened.set()
    assert (answer.status_code, answer.json()["type"]) == (504, "urn:pipeplan:problem:deadline")
    assert "not answered within 0.1 s" in answer.json()["detail"]
    assert "Prefer: respond-async" in answer.json()["detail"]


def test_other_requests_are_answered_while_planners_work_and_too_many_are_a_503(database_url: str, gate: Gate) -> None:
    with _service(database_url, gate, solver_processes=1, solver_queue=0) as http, ThreadPoolExecutor(1) as pool:
        at_work = pool.submit(http.post, "/v1/plans", json=request_document())
        gate.asked.acquire()
        refused = http.post("/v1/plans", json=request_document())
        assert http.get("/healthz").status_code == 200
        gate.opened.set()
        assert at_work.result().status_code == 201
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:pipeplan:problem:unavailable")
    assert int(refused.headers["retry-after"]) >= 1


def test_what_the_planner_raises_is_the_requests_problem(database_url: str) -> None:
    def refuse(planner: str, problem: PlanningProblem) -> Answer:
        raise InvalidInputError("options.stages", "must divide the devices", 3)

    with _service(database_url, refuse) as http:
        answer = http.post("/v1/plans", json=request_document())
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"field": "options.stages", "rule": "must divide the devices", "value": 3}]


def test_a_plan_as_a_job_is_a_202_with_its_place_and_ends_with_the_plans_id(database_url: str) -> None:
    with _service(database_url, halve) as http:
        taken = http.post("/v1/plans", json=request_document(), headers={"Prefer": "respond-async"})
        assert (taken.status_code, taken.headers["preference-applied"]) == (202, "respond-async")
        assert taken.headers["location"] == f"/v1/jobs/{taken.json()['id']}"
        assert taken.json()["task"] == {"kind": "plan", "request": request_document()}
        http.get(f"{taken.headers['location']}/events")
        job = http.get(taken.headers["location"]).json()
        assert (job["state"], job["infeasible"], job["error"]) == ("succeeded", None, None)
        plan = http.get(f"/v1/plans/{job['plan_id']}")
        direct = http.post("/v1/plans", json=request_document())
    assert (direct.status_code, direct.json()["id"]) == (200, job["plan_id"])
    assert parse_plan(plan.content).batch_size == 16


@pytest.mark.each_case
def test_waiting_for_a_job_gives_the_plan_if_it_is_there_in_time(database_url: str, gate: Gate) -> None:
    with _service(database_url, gate, solver_processes=2) as http:
        late = http.post("/v1/plans", json=request_document(), headers={"Prefer": "respond-async, wait=1"})
        assert late.status_code == 202
        assert gate.asked.acquire(timeout=PATIENCE_S)
        assert http.get(f"/v1/jobs/{late.json()['id']}").json()["state"] == "leased"
        gate.opened.set()
        there = http.post("/v1/plans", json=request_document(), headers={"Prefer": "respond-async; x=1, wait=30"})
    assert (there.status_code, there.headers["preference-applied"]) == (201, "respond-async, wait=30")
    assert there.headers["location"] == f"/v1/plans/{there.json()['id']}"


def test_that_no_plan_fits_is_what_a_job_ends_with_and_no_failure(database_url: str) -> None:
    with _service(database_url, halve) as http:
        tight = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=20 * 2**20))
        cluster_id = http.post("/v1/clusters", json=asdict(tight)).json()["id"]
        prefer = {"Prefer": "respond-async, wait=30"}
        answer = http.post("/v1/plans", json=request_document(cluster_id=cluster_id), headers=prefer)
        job = http.get("/v1/jobs").json()["items"][0]
        assert http.get("/v1/plans").json()["items"] == []
    assert (answer.status_code, answer.json()["feasible"]) == (200, False)
    assert (job["state"], job["plan_id"]) == ("succeeded", None)
    assert job["infeasible"]["reasons"][0]["missing_bytes"] == 4 * 2**20


def test_a_job_that_no_planner_could_be_asked_is_refused_at_once(database_url: str) -> None:
    with _service(database_url, halve) as http:
        answers = [
            http.post("/v1/plans", json=request_document(profile_id="0" * 32), headers={"Prefer": "respond-async"}),
            http.post("/v1/jobs", json={"kind": "plan", "request": request_document(cluster_id="0" * 32)}),
        ]
        assert http.get("/v1/jobs").json()["items"] == []
    assert [answer.status_code for answer in answers] == [422, 422]
    assert [answer.json()["errors"][0]["field"] for answer in answers] == ["profile_id", "cluster_id"]


def test_a_known_clusters_name_stands_in_place_of_an_id(database_url: str) -> None:
    named = request_document(cluster_id="dgx-h100:2", options={"as_if": True})
    with _service(database_url, halve) as http:
        assert len(http.get("/v1/clusters").json()["items"]) == 1
        plan = http.post("/v1/plans", json=named)
        again = http.post("/v1/plans", json=named)
        stored = http.get(f"/v1/clusters/{plan.json()['cluster_id']}").json()
        listed = http.get("/v1/plans", params={"cluster_id": plan.json()["cluster_id"]}).json()["items"]
        taken = http.post("/v1/jobs", json={"kind": "plan", "request": named})
        http.get(f"{taken.headers['location']}/events")
        job = http.get(taken.headers["location"]).json()
    assert (plan.status_code, again.status_code) == (201, 200)
    assert parse(Cluster, stored) == named_cluster("dgx-h100:2")
    assert [item["id"] for item in listed] == [plan.json()["id"]] == [job["plan_id"]]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("dgx-h10:2", "must be the id of a stored cluster, or NAME or NAME:NODES of a known cluster (near: dgx-h100"),
        ("dgx-h100:x", "must have a whole number of nodes after the colon, as dgx-h100:4"),
    ],
)
def test_a_name_that_stands_for_no_cluster_stores_nothing(database_url: str, name: str, rule: str) -> None:
    with _service(database_url, halve) as http:
        answer = http.post("/v1/plans", json=request_document(cluster_id=name))
        assert len(http.get("/v1/clusters").json()["items"]) == 1
    error = answer.json()["errors"][0]
    assert (answer.status_code, error["field"]) == (422, "cluster_id")
    assert error["rule"].startswith(rule)


def test_a_planner_that_raises_fails_its_job_with_the_sentence(database_url: str) -> None:
    def refuse(planner: str, problem: PlanningProblem) -> Answer:
        raise InvalidInputError("options.stages", "must divide the devices", 3)

    with _service(database_url, refuse) as http:
        taken = http.post("/v1/jobs", json={"kind": "plan", "request": request_document()})
        http.get(f"{taken.headers['location']}/events")
        job = http.get(taken.headers["location"]).json()
    assert (job["state"], job["error"]) == ("failed", "options.stages: must divide the devices, got 3")


def test_a_job_beyond_its_deadline_fails_and_says_so(database_url: str, gate: Gate) -> None:
    with _service(database_url, gate, plan_job_deadline_s=0.1) as http:
        taken = http.post("/v1/plans", json=request_document(), headers={"Prefer": "respond-async"})
        http.get(f"{taken.headers['location']}/events")
        job = http.get(taken.headers["location"]).json()
        gate.opened.set()
    assert (job["state"], job["error"]) == ("failed", "the planner has not answered within 0.1 s")


@pytest.mark.parametrize(
    ("header", "preference"),
    [
        (None, Preference()),
        ("respond-async", Preference(respond_async=True)),
        ("Respond-Async , WAIT = 5", Preference(respond_async=True, wait_s=5)),
        ('handling=lenient, wait="10", respond-async; foo="some value"', Preference(respond_async=True, wait_s=10)),
        ("wait=100000, respond-async", Preference(respond_async=True, wait_s=60)),
        ("respond-async, wait=-1", Preference(respond_async=True)),
        ("respond-async, wait=soon", Preference(respond_async=True)),
        ("return=minimal, wait=5", Preference(wait_s=5)),
        (";;==,,\x7f", Preference()),
    ],
)
def test_preferences_are_read_and_those_that_nobody_knows_are_left_aside(
    header: str | None, preference: Preference
) -> None:
    assert preference_of(header) == preference


def test_a_job_for_a_planner_that_does_not_exist_is_refused_before_it_waits(database_url: str) -> None:
    """It was taken, and failed later: the command line said that the service cannot be reached."""
    with _service(database_url, halve) as http:
        asked = request_document(planner="pipdream")
        answer = http.post("/v1/plans", json=asked, headers={"Prefer": "respond-async"})
        assert http.get("/v1/jobs").json()["items"] == []
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "planner")


def test_a_request_that_names_no_planner_asks_auto(database_url: str) -> None:
    """As `pipeplan solve` does."""
    with _service(database_url, halve) as http:
        asked = request_document()
        del asked["planner"]
        made = http.post("/v1/plans", json=asked).raise_for_status().json()
        again = http.post("/v1/plans", json=asked | {"planner": "auto"}).raise_for_status().json()
    assert (made["planner"], again["id"]) == ("auto", made["id"])
