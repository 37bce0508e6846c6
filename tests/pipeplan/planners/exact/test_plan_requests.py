"""The planner exact through the service: a cluster of unequal devices and a profile for each type."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from planner_service.app import create_app
from planner_service.platform.settings import Settings
from tests.pipeplan.builders import Cell
from tests.pipeplan.planners.exact.mixed import Gpu, mixed_problem

PROBLEM = mixed_problem([Cell()] * 6, [Gpu(name="fast"), Gpu(name="slow", slowness=2.0)])


@pytest.fixture
def http(tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'service.sqlite3'}")
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
        yield client


def asked(http: TestClient, **changed: Any) -> dict[str, Any]:
    profiles = [PROBLEM.profile, *PROBLEM.other_profiles]
    first, other = (http.post("/v1/profiles", json=asdict(profile)).json()["id"] for profile in profiles)
    cluster = http.post("/v1/clusters", json=asdict(PROBLEM.cluster)).json()["id"]
    request = {"profile_id": first, "other_profile_ids": [other], "cluster_id": cluster, "planner": "exact"}
    return request | {"batch_size": 8, "options": {"schedule": "1f1b", "stages": 2}} | changed


def test_a_request_names_a_profile_for_each_type_of_device(http: TestClient) -> None:
    created = http.post("/v1/plans", json=asked(http))
    assert created.status_code == 201
    blocks = {stage["device"]: stage["stop"] - stage["start"] for stage in created.json()["stages"]}
    assert blocks == {"fast": 4, "slow": 2}
    again = http.post("/v1/plans", json=asked(http))
    assert (again.status_code, again.json()["id"]) == (200, created.json()["id"])


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"other_profile_ids": []}, "other_profiles"),
        ({"other_profile_ids": ["none"]}, "other_profile_ids"),
        ({"options": {"time_limit_s": 61.0}}, "options.time_limit_s"),
        ({"planner": "pipedream"}, "cluster.groups"),
    ],
)
def test_what_does_not_match_is_named(http: TestClient, changed: dict[str, Any], field: str) -> None:
    refused = http.post("/v1/plans", json=asked(http, **changed))
    assert refused.status_code == 422
    assert field in refused.text
