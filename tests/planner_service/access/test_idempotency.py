"""Idempotency keys: one effect and one answer, whatever comes again and whatever breaks in between."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.plan import Answer
from pipeplan.errors import ConflictError, InFlightError, InvalidInputError, ServiceError
from pipeplan.planners.problem import PlanningProblem
from planner_service.access import idempotency
from planner_service.access.idempotency import Key, Reply, key_of, perform
from planner_service.app import create_app
from planner_service.jobs import service as jobs
from planner_service.overview.openapi import CLUSTER
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.listing import Cut
from planner_service.platform.settings import Settings
from tests.planner_service.answers import halve
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import PROFILE_TASK, profile_document, request_document

TASK = PROFILE_TASK.model_dump(mode="json")
KEY = key_of("somebody", "a key", "a request")
DAY_S = 86_400


def _enqueue(context: Context) -> Reply:
    job = jobs.enqueue(context, PROFILE_TASK)
    return Reply(status=201, body=job.model_dump_json(), location=f"/v1/jobs/{job.id}")


def _jobs(context: Context) -> int:
    return len(jobs.newest(context, Cut(limit=200)).items)


def test_the_same_request_under_a_key_has_one_effect_and_the_same_answer(http: TestClient) -> None:
    first, again = (http.post("/v1/jobs", json=TASK, headers={"Idempotency-Key": "k"}) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.content == again.content
    assert first.headers["location"] == again.headers["location"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert len(http.get("/v1/jobs").json()["items"]) == 1


def test_the_key_for_another_request_is_refused_and_named(http: TestClient) -> None:
    headers = {"Idempotency-Key": "k"}
    job = http.post("/v1/jobs", json=TASK, headers=headers).json()
    others = [
        http.post("/v1/jobs", json=TASK | {"rounds": 9}, headers=headers),
        http.post("/v1/jobs/lease", json={"agent": "node-1"}, headers=headers),
        http.post(f"/v1/jobs/{job['id']}/cancel", headers=headers),
    ]
    for other in others:
        assert other.status_code == 422
        assert other.json()["errors"][0] == {
            "field": "Idempotency-Key",
            "rule": "must not be used again for another request",
            "value": "k",
        }
    assert http.get(f"/v1/jobs/{job['id']}").json()["state"] == "queued"


@pytest.mark.each_case
@pytest.mark.parametrize("key", ["", " " * 201, "x" * 201])
def test_a_key_that_can_be_none_is_refused(http: TestClient, key: str) -> None:
    answer = http.post("/v1/jobs", json=TASK, headers={"Idempotency-Key": key})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Idempotency-Key"
    assert http.get("/v1/jobs").json()["items"] == []


def test_cancel_and_lease_are_repeated_as_they_were(http: TestClient) -> None:
    http.post("/v1/jobs", json=TASK)
    leases = [
        http.post("/v1/jobs/lease", json={"agent": "n"}, headers={"Idempotency-Key": "lease"}).json() for _ in range(2)
    ]
    assert leases[0]["token"] == leases[1]["token"]
    job_id = leases[0]["job"]["id"]
    cancelled = [http.post(f"/v1/jobs/{job_id}/cancel", headers={"Idempotency-Key": "c"}) for _ in range(2)]
    assert cancelled[0].content == cancelled[1].content
    nothing = [http.post("/v1/jobs/lease", json={"agent": "n"}, headers={"Idempotency-Key": "e"}) for _ in range(2)]
    assert [(answer.status_code, answer.content) for answer in nothing] == [(204, b"")] * 2


def test_a_plan_and_a_plan_job_are_answered_again_as_they_were(http: TestClient) -> None:
    http.post("/v1/profiles", json=profile_document())
    http.post("/v1/clusters", json=asdict(CLUSTER))
    plans = [http.post("/v1/plans", json=request_document(), headers={"Idempotency-Key": "p"}) for _ in range(2)]
    assert [plan.status_code for plan in plans] == [201, 201]
    assert plans[0].content == plans[1].content
    headers = {"Idempotency-Key": "j", "Prefer": "respond-async"}
    taken = [http.post("/v1/plans", json=request_document(), headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in taken] == [202, 202]
    assert taken[0].headers["location"] == taken[1].headers["location"]
    assert len(http.get("/v1/jobs").json()["items"]) == 1


def test_a_request_in_flight_is_a_409_that_says_when_to_come_back(database_url: str) -> None:
    asked, opened = threading.Event(), threading.Event()

    def slowly(planner: str, problem: PlanningProblem) -> Answer:
        asked.set()
        opened.wait()
        return halve(planner, problem)

    app = create_app(Settings(database_url=database_url), solve=slowly)
    with TestClient(app, base_url="http://127.0.0.1") as http, ThreadPoolExecutor(1) as pool:
        http.post("/v1/profiles", json=profile_document())
        http.post("/v1/clusters", json=asdict(CLUSTER))

        def ask() -> Any:
            return http.post("/v1/plans", json=request_document(), headers={"Idempotency-Key": "k"})

        first = pool.submit(ask)
        asked.wait()
        second = ask()
        opened.set()
        assert first.result().status_code == 201
        assert ask().content == first.result().content
    assert (second.status_code, second.json()["type"]) == (409, "urn:pipeplan:problem:in-flight")
    assert int(second.headers["retry-after"]) >= 1


def test_a_plan_that_is_refused_frees_its_key(http: TestClient) -> None:
    headers = {"Idempotency-Key": "k"}
    assert http.post("/v1/plans", json=request_document(), headers=headers).status_code == 422
    http.post("/v1/profiles", json=profile_document())
    http.post("/v1/clusters", json=asdict(CLUSTER))
    assert http.post("/v1/plans", json=request_document(), headers=headers).status_code == 201


def test_a_tokens_secret_is_not_kept_and_no_second_token_made(http: TestClient, context: Context) -> None:
    body = {"name": "ci", "scopes": ["plan"]}
    made = http.post("/v1/tokens", json=body, headers={"Idempotency-Key": "k"})
    again = http.post("/v1/tokens", json=body, headers={"Idempotency-Key": "k"})
    assert (made.status_code, again.status_code) == (201, 409)
    assert made.headers["location"] in again.json()["detail"]
    assert len(http.get("/v1/tokens").json()["items"]) == 1
    with context.database.read() as connection:
        kept = connection.exec_driver_sql("SELECT * FROM idempotency_keys").all()
    assert made.json()["token"] not in repr(kept)


def test_a_failure_before_the_end_leaves_neither_effect_nor_key(context: Context) -> None:
    def break_down(within: Context) -> Reply:
        _enqueue(within)
        raise ServiceError("the power went")

    with pytest.raises(ServiceError):
        perform(context, KEY, break_down)
    assert _jobs(context) == 0
    assert not perform(context, KEY, _enqueue).replayed
    assert perform(context, KEY, _enqueue).replayed
    assert _jobs(context) == 1


def test_callers_have_keys_of_their_own(context: Context) -> None:
    for caller in ("one", "two"):
        perform(context, Key(name=(caller, "a key"), fingerprint="a request"), _enqueue)
    assert _jobs(context) == 2


def test_of_many_at_once_one_has_the_effect_in_whichever_process(
    context: Context, database_url: str, clock: Clock
) -> None:
    other = Context(database=Database(database_url), solve=halve, now=clock)
    start = threading.Barrier(8)

    def enqueue(index: int) -> Reply:
        start.wait()
        return perform((context, other)[index % 2], KEY, _enqueue).reply

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(enqueue, range(8)))
    other.database.close()
    assert len(set(replies)) == 1
    assert _jobs(context) == 1


def test_keys_are_over_after_a_day_and_are_pruned(context: Context, clock: Clock) -> None:
    first = perform(context, KEY, _enqueue)
    clock.advance(DAY_S - 1)
    assert perform(context, KEY, _enqueue) == idempotency.OnceOutcome(reply=first.reply, replayed=True)
    assert idempotency.prune(context) == 0
    clock.advance(2)
    assert perform(context, KEY, _enqueue).reply != first.reply
    clock.advance(DAY_S + 1)
    assert idempotency.prune(context) == 1
    assert idempotency.prune(context) == 0


def test_what_was_held_by_a_process_that_died_is_let_go_after_a_while(context: Context, clock: Clock) -> None:
    assert idempotency.hold(context, KEY, 60) is None
    with pytest.raises(InFlightError):
        idempotency.hold(context, KEY, 60)
    with pytest.raises(InvalidInputError, match="another request"):
        idempotency.hold(context, key_of("somebody", "a key", "another"), 60)
    clock.advance(61)
    assert idempotency.hold(context, KEY, 60) is None
    with context.database.write() as connection:
        idempotency.settle(connection, KEY, Reply(status=200, body="{}"))
    known = idempotency.hold(context, KEY, 60)
    assert known is not None
    assert (known.replayed, known.reply.body) == (True, "{}")


def test_a_secret_is_told_once(context: Context) -> None:
    told = perform(context, KEY, lambda _: Reply(status=201, body="secret", location="/there"), secret=True)
    assert told.reply.body == "secret"
    with pytest.raises(ConflictError, match="/there"):
        perform(context, KEY, lambda _: Reply(status=201, body="another secret"), secret=True)
