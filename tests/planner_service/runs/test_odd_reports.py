"""Reports of numbers that no run measures: refused at their field; nothing is stored, and the pages stand."""

import json
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.files import dump
from pipeplan.protocol.jobs import Completion
from planner_service.jobs import service as jobs
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from tests.planner_service.examples import ANY_WORK, run_result, run_task, store_plan

JSON = {"Content-Type": "application/json"}
RATES = "result.report.throughput_samples_per_s"
ODD = [
    (f"{RATES}.predicted", 0.0),
    (f"{RATES}.predicted", 1e-320),
    (f"{RATES}.predicted", -1.0),
    (f"{RATES}.measured", 1e308),
    (f"{RATES}.measured", -1.0),
    ("result.report.bubble_fraction.measured", -1e308),
    ("result.report.stages.0.busy_s_per_batch.predicted", 1e30),
    ("result.report.steps", 0),
    ("result.report.steps", 10**400),
    ("result.report.first_step", -1),
    ("result.report.batch_size", 0),
    ("result.report.elapsed_s", 1e308),
    ("result.report.schedule", "\x1b[2J"),
    ("result.report.missed.kinds.0.kind", "a\nb"),
    ("result.timeline.lanes.0.start_s.0", 1e308),
    ("result.timeline.lanes.0.end_s.1", -1e308),
]


def _changed(document: dict[str, Any], path: str, value: object) -> str:
    place: Any = document
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        place = place[part]
    place[last] = value
    return json.dumps(document)


@pytest.mark.each_case
@pytest.mark.parametrize(("path", "value"), ODD)
def test_an_odd_number_is_refused_where_it_stands(http: TestClient, context: Context, path: str, value: object) -> None:
    """A rate of zero made the first page a 500 for everybody; a moment of 1e308 s, the run's trace."""
    plan_id = store_plan(context)
    job = jobs.enqueue(context, run_task(plan_id))
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    report = Completion(token=lease.token, result=run_result(plans.get(context, plan_id)))
    address = f"/v1/jobs/{job.id}/complete"
    refused = http.post(address, content=_changed(json.loads(dump(report)), path, value), headers=JSON)
    assert refused.status_code == 422, refused.text
    (error, *_) = refused.json()["errors"]
    assert error["field"] == re.sub(r"\.[0-9]+$", "", path)
    assert jobs.get(context, job.id).state == "leased"
    for page in ("/", f"/runs/{job.run_id}", "/v1/overview/charts/errors.csv"):
        assert http.get(page).status_code == 200
    http.post(address, content=dump(report), headers=JSON).raise_for_status()
    assert http.get(f"/v1/runs/{job.run_id}/trace").status_code == 200
