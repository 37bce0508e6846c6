"""Plans whose request carries a calibration."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from fastapi.testclient import TestClient

from pipeplan.calibration.calibrate import calibrate
from pipeplan.calibration.samples import MeasuredRun
from pipeplan.documents.calibration import Calibration
from pipeplan.documents.files import dump, parse_plan
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.simulation.predict import predict
from planner_service.app import create_app
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.platform.settings import Settings
from tests.planner_service.examples import profile_document, request_document


@pytest.fixture
def ready(database_url: str) -> Iterator[TestClient]:
    """The application with its real planners, the profile and the cluster that the examples name."""
    app = create_app(Settings(database_url=database_url))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        client.post("/v1/profiles", json=profile_document())
        client.post("/v1/clusters", json=asdict(CLUSTER))
        yield client


def twice_as_slow(plan: Plan) -> Calibration:
    """What a run shows whose forwards and backwards take twice the profile's time."""
    slow = tuple(replace(c, forward_s=2 * c.forward_s, backward_s=2 * c.backward_s) for c in plan.costs)
    run = MeasuredRun(plan=plan, timeline=predict(replace(plan, costs=slow), batches=4))
    return calibrate(PROFILE, CLUSTER, [run])


@pytest.mark.each_case
def test_the_plan_is_made_with_the_corrected_costs_and_says_so(ready: TestClient) -> None:
    plain = parse_plan(ready.post("/v1/plans", json=request_document()).content)
    found = twice_as_slow(plain)
    calibration = json.loads(dump(asdict(found)))
    corrected = parse_plan(ready.post("/v1/plans", json=request_document(calibration=calibration)).content)
    assert corrected.calibration_id == content_id(found)
    assert (corrected.profile_id, corrected.cluster_id) == (plain.profile_id, plain.cluster_id)
    assert corrected.simulated is not None and plain.simulated is not None
    for found_of in ("simulated", "closed_form"):
        halved = getattr(plain, found_of).throughput_samples_per_s / 2
        assert getattr(corrected, found_of).throughput_samples_per_s == pytest.approx(halved, rel=0.01)


@pytest.mark.each_case
def test_a_calibration_of_another_model_is_refused_by_field(ready: TestClient) -> None:
    plain = parse_plan(ready.post("/v1/plans", json=request_document()).content)
    calibration = json.loads(dump(asdict(twice_as_slow(plain)))) | {"device": "another"}
    answer = ready.post("/v1/plans", json=request_document(calibration=calibration))
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "calibration.device"


@pytest.mark.each_case
def test_a_calibration_with_an_unknown_key_is_refused(ready: TestClient) -> None:
    answer = ready.post("/v1/plans", json=request_document(calibration={"magic": 1.0}))
    assert answer.status_code == 422
