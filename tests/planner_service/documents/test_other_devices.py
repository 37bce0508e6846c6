"""A profile of one type of device on a cluster of another, asked of the service: at once, as a job, on the pages."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.planners.solve import solve
from planner_service.app import create_app
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.platform.settings import Settings
from tests.planner_service.examples import request_document

V100, H100 = "V100-SXM2-16GB", "H100-SXM5-80GB"
AS_IF = f"planned as if '{H100}' were '{V100}': the figures are of '{V100}', the profile's device"


@pytest.fixture
def http(database_url: str) -> Iterator[TestClient]:
    app = create_app(Settings(database_url=database_url), solve=solve)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def asked(http: TestClient, profiled: str = V100, present: str = H100, **options: Any) -> dict[str, Any]:
    """A request for a plan, of a stored profile and a stored cluster."""
    profile = replace(PROFILE, device=replace(PROFILE.device, name=profiled))
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, name=present))
    return request_document(
        profile_id=http.post("/v1/profiles", json=asdict(profile)).json()["id"],
        cluster_id=http.post("/v1/clusters", json=asdict(cluster)).json()["id"],
        options=options,
    )


def test_another_known_type_is_a_422_however_it_is_asked(http: TestClient) -> None:
    document = asked(http)
    answers = [
        http.post("/v1/plans", json=document),
        http.post("/v1/plans", json=document, headers={"Prefer": "respond-async"}),
        http.post("/v1/jobs", json={"kind": "plan", "request": document}),
    ]
    for answer in answers:
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["field"], error["value"]) == (422, "profile.device.name", V100)
        assert "--as-if, options.as_if" in error["rule"]
    assert http.get("/v1/jobs").json()["items"] == []


def test_as_if_plans_it_and_the_plan_says_whose_figures_they_are(http: TestClient) -> None:
    document = asked(http, as_if=True)
    created = http.post("/v1/plans", json=document)
    assert created.status_code == 201
    assert [warning.partition(";")[0] for warning in created.json()["warnings"]] == [AS_IF]
    plan_id = created.json()["id"]
    assert http.get(f"/v1/plans/{plan_id}").json()["warnings"] == created.json()["warnings"]
    assert "<strong>Warning:</strong> planned as if &#39;H100" in http.get(f"/plans/{plan_id}").text
    taken = http.post("/v1/plans", json=document, headers={"Prefer": "respond-async, wait=30"})
    assert taken.json()["id"] == plan_id


def test_a_name_is_shown_and_never_run(http: TestClient) -> None:
    created = http.post("/v1/plans", json=asked(http, profiled="<script>alert(1)</script>"))
    page = http.get(f"/plans/{created.json()['id']}").text
    assert "the profile is of &#39;&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page


def test_a_plan_for_its_own_device_has_no_warnings(http: TestClient) -> None:
    created = http.post("/v1/plans", json=asked(http, present="Tesla V100-SXM2-16GB"))
    assert created.status_code == 201
    assert "warnings" not in created.json()
    assert "Warning:" not in http.get(f"/plans/{created.json()['id']}").text
