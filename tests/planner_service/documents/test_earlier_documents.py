"""What was stored before SPECs and names were checked: lists show it, and whoever uses it gets one clear error."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from pipeplan.protocol.jobs import PlanTask, ProfileTask
from pipeplan.protocol.plans import PlanRequest
from planner_service.jobs import service as jobs
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.platform.tables import jobs as job_table
from planner_service.platform.tables import plans as plan_table
from planner_service.platform.tables import profiles as profile_table
from tests.planner_service.examples import PROFILE_TASK, request_document, store_plan

HOSTILE = "hf:gpt2\nPLAN\nreboot"
RULE = "must hold printable characters and no spaces"


def _spoil(context: Context, table: Any) -> None:
    """Gives every stored document of a table the model of an earlier time."""
    with context.database.write() as connection:
        for row in connection.execute(table.select()).all():
            document = json.loads(row.content)
            document["model"]["spec"] = HOSTILE
            connection.execute(update(table).where(table.c.id == row.id).values(content=json.dumps(document)))


def _refused(http: TestClient, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 422, answer.text
    assert RULE in answer.text


def test_an_earlier_profile_is_listed_and_shown_and_no_plan_made_of_it(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    profile_id = plans.summary(context, plan_id).profile_id
    _spoil(context, profile_table)
    assert [item["id"] for item in http.get("/v1/profiles").json()["items"]] == [profile_id]
    assert http.get(f"/v1/profiles/{profile_id}").json()["model"]["spec"] == HOSTILE
    assert http.get("/").status_code == 200
    _refused(http, f"/profiles/{profile_id}")
    _refused(http, f"/v1/plans/{plan_id}/exports/torchrun")
    asked = http.post("/v1/plans", json=request_document(batch_size=32))
    assert asked.status_code == 422
    (error,) = asked.json()["errors"]
    assert error["field"] == "profile_id.model.spec" and error["rule"].startswith(RULE)


def test_an_earlier_plan_is_listed_and_not_used(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    _spoil(context, plan_table)
    assert [item["id"] for item in http.get("/v1/plans").json()["items"]] == [plan_id]
    assert http.get("/v1/plans?content=true").json()["items"][0]["model"]["spec"] == HOSTILE
    for path in (f"/v1/plans/{plan_id}/streams", f"/v1/plans/{plan_id}/exports/slurm", f"/plans/{plan_id}"):
        _refused(http, path)


def test_an_earlier_job_is_listed(http: TestClient, context: Context) -> None:
    job = jobs.enqueue(context, PROFILE_TASK)
    earlier = ProfileTask(model=HOSTILE, microbatch_sizes=(1,))
    with context.database.write() as connection:
        connection.execute(update(job_table).where(job_table.c.id == job.id).values(task=earlier.model_dump_json()))
    assert http.get("/v1/jobs").json()["items"][0]["task"]["model"] == HOSTILE
    assert http.get(f"/jobs/{job.id}").status_code == 200


def test_an_earlier_plan_job_is_listed_with_its_calibrations_names_on_one_line(
    http: TestClient, context: Context
) -> None:
    store_plan(context)
    job = jobs.enqueue(context, PlanTask(request=PlanRequest.model_validate(request_document())))
    calibration = {"model": {"name": "a\nb", "spec": HOSTILE}, "device": "c\u2028d", "dtype": "float32"}
    calibration |= {"profile_id": "p", "cluster_id": "c", "runs": []}
    task = {"kind": "plan", "request": request_document() | {"calibration": calibration}}
    with context.database.write() as connection:
        connection.execute(update(job_table).where(job_table.c.id == job.id).values(task=json.dumps(task)))
    shown = http.get("/v1/jobs").json()["items"][0]["task"]["request"]["calibration"]
    assert shown["model"] == {"name": r"a\nb", "spec": None}
    assert shown["device"] == r"c\u2028d"


@pytest.mark.each_case
@pytest.mark.parametrize("field", ["model", "data", "loss"])
def test_a_new_job_with_such_a_spec_is_refused_by_its_field(http: TestClient, context: Context, field: str) -> None:
    plan_id = store_plan(context)
    task = {"kind": "run", "plan_id": plan_id, "model": "hf:gpt2", "data": "preset:random_tokens", "steps": 1}
    answer = http.post("/v1/jobs", json=task | {field: "a:b\nreboot"})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == field and error["rule"].startswith(RULE)


@pytest.mark.each_case
def test_data_is_never_a_family(http: TestClient, context: Context) -> None:
    task = {"kind": "run", "plan_id": store_plan(context), "model": "hf:gpt2", "data": "hf:gpt2", "steps": 1}
    (error,) = http.post("/v1/jobs", json=task).json()["errors"]
    assert error == {
        "field": "data",
        "rule": "must name a callable as preset:NAME or package.module:factory",
        "value": "hf:gpt2",
    }
