"""Jobs and runs over HTTP: what agents and people send and get."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.protocol.jobs import Completion
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import PROFILE_RESULT, PROFILE_TASK, run_result, run_task, store_plan

TASK = PROFILE_TASK.model_dump(mode="json")
AGENT = {"agent": "node-1"}


def _run_job(http: TestClient, context: Context) -> dict[str, Any]:
    """Enqueues a run of the examples' plan and leases it."""
    task = run_task(store_plan(context)).model_dump(mode="json")
    http.post("/v1/jobs", json=task)
    lease: dict[str, Any] = http.post("/v1/jobs/lease", json=AGENT).json()
    return lease


def _finish_run(http: TestClient, context: Context) -> str:
    lease = _run_job(http, context)
    result = run_result(plans.get(context, lease["job"]["task"]["plan_id"]))
    completion = Completion(token=lease["token"], result=result).model_dump_json()
    path = f"/v1/jobs/{lease['job']['id']}/complete"
    answer = http.post(path, content=completion, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return str(lease["job"]["run_id"])


def test_nothing_to_do_is_an_empty_answer(http: TestClient) -> None:
    answer = http.post("/v1/jobs/lease", json=AGENT)
    assert (answer.status_code, answer.content) == (204, b"")


def test_a_job_goes_from_queued_to_succeeded(http: TestClient) -> None:
    created = http.post("/v1/jobs", json=TASK)
    assert (created.status_code, created.json()["state"]) == (201, "queued")
    location = created.headers["location"]
    lease = http.post("/v1/jobs/lease", json=AGENT).json()
    assert (lease["job"]["state"], lease["job"]["agent"], lease["expires_in_s"]) == ("leased", "node-1", 30.0)
    beat = {"token": lease["token"], "progress": {"done": 1, "total": 2}}
    assert http.post(f"{location}/heartbeat", json=beat).json() == {"expires_in_s": 30.0, "cancelled": False}
    completion = {"token": lease["token"], "result": PROFILE_RESULT.model_dump(mode="json")}
    assert http.post(f"{location}/complete", json=completion).json()["state"] == "succeeded"
    assert http.get(location).json()["profile_id"] == http.get("/v1/profiles").json()["items"][0]["id"]


def test_an_idempotency_key_makes_a_retry_safe(http: TestClient) -> None:
    headers = {"Idempotency-Key": "a"}
    first = http.post("/v1/jobs", json=TASK, headers=headers)
    again = http.post("/v1/jobs", json=TASK, headers=headers)
    other = http.post("/v1/jobs", json=TASK | {"rounds": 9}, headers=headers)
    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
    assert first.json() == again.json()
    assert other.json()["errors"][0]["field"] == "Idempotency-Key"
    too_long = http.post("/v1/jobs", json=TASK, headers={"Idempotency-Key": "x" * 201})
    assert too_long.json()["errors"][0]["field"] == "Idempotency-Key"


def test_a_lost_lease_is_a_conflict_of_its_own_type(http: TestClient, clock: Clock) -> None:
    http.post("/v1/jobs", json=TASK)
    lease = http.post("/v1/jobs/lease", json=AGENT).json()
    clock.advance(31)
    http.post("/v1/jobs/lease", json={"agent": "node-2"})
    answer = http.post(f"/v1/jobs/{lease['job']['id']}/fail", json={"token": lease["token"], "error": "x"})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:pipeplan:problem:lease-lost")


def test_jobs_can_be_listed_by_state(http: TestClient) -> None:
    ids = [http.post("/v1/jobs", json=TASK).json()["id"] for _ in range(3)]
    http.post(f"/v1/jobs/{ids[0]}/cancel")
    listed = http.get("/v1/jobs", params={"state": ["cancelled", "failed"]}).json()["items"]
    assert [job["id"] for job in listed] == ids[:1]
    assert len(http.get("/v1/jobs").json()["items"]) == 3
    assert http.get("/v1/jobs", params={"state": "lost"}).status_code == 422


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kind": "dance"}, "document"),
        ({}, "kind"),
        (TASK | {"microbatch_sizes": []}, "microbatch_sizes"),
        (TASK | {"microbatch_sizes": [0]}, "microbatch_sizes.0"),
        (TASK | {"code": "import os"}, "code"),
        ({"kind": "run", "plan_id": "p", "model": "m", "data": "d", "steps": 0}, "steps"),
        ({"kind": "run", "plan_id": "p", "model": "m:m", "data": "d:d", "steps": 1}, "plan_id"),
        ({"kind": "run", "plan_id": "p", "model": "m:m", "data": "d", "steps": 1}, "data"),
    ],
)
def test_a_wrong_task_is_refused_naming_the_senders_field(http: TestClient, body: dict[str, Any], field: str) -> None:
    answer = http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
    assert http.get("/v1/jobs").json()["items"] == []


def test_a_wrong_completion_names_the_senders_field_and_ends_nothing(http: TestClient) -> None:
    http.post("/v1/jobs", json=TASK)
    lease = http.post("/v1/jobs/lease", json=AGENT).json()
    result = PROFILE_RESULT.model_dump(mode="json")
    result["profile"]["dtype"] = "int3"
    path = f"/v1/jobs/{lease['job']['id']}"
    answer = http.post(f"{path}/complete", json={"token": lease["token"], "result": result})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "result.profile.dtype")
    assert http.get(path).json()["state"] == "leased"


def test_a_run_follows_its_job_and_shows_what_was_measured(http: TestClient, context: Context) -> None:
    run_id = _finish_run(http, context)
    run = http.get(f"/v1/runs/{run_id}").json()
    assert run["state"] == "succeeded"
    assert run["report"]["throughput_samples_per_s"] == {"predicted": 60.0, "measured": 48.0}
    (listed,) = http.get("/v1/runs").json()["items"]
    assert (listed["id"], listed["measured_samples_per_s"], listed["schedule"]) == (run_id, 48.0, "1f1b")
    assert http.get("/v1/runs", params={"plan_id": run["plan_id"]}).json()["items"] == [listed]
    assert http.get("/v1/runs", params={"plan_id": "other"}).json()["items"] == []


def test_a_runs_trace_has_both_timelines_side_by_side(http: TestClient, context: Context) -> None:
    run_id = _finish_run(http, context)
    events = json.loads(http.get(f"/v1/runs/{run_id}/trace").text)["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["predicted", "measured"]
    measured = http.get(f"/v1/runs/{run_id}/timeline").json()
    assert measured["batches"] == 4


def test_a_run_that_has_not_succeeded_has_no_timeline(http: TestClient, context: Context) -> None:
    run_id = _run_job(http, context)["job"]["run_id"]
    answer = http.get(f"/v1/runs/{run_id}/timeline")
    assert answer.status_code == 404
    assert answer.json()["detail"] == f"run {run_id} has no timeline: it is leased"
    assert http.get("/v1/runs/nothing").status_code == 404
