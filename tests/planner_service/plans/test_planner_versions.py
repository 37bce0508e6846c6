"""Planners' versions: the same request to another version is another plan, and the old one stays with its version."""

from collections.abc import Iterator
from dataclasses import asdict

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.plan import FIRST_VERSION
from pipeplan.planners import solve as solvers
from planner_service.app import create_app
from planner_service.overview.openapi import CLUSTER
from planner_service.plans.solver import solve_here
from planner_service.platform.settings import Settings
from tests.planner_service.examples import profile_document, request_document


@pytest.fixture
def service(sqlite_url: str) -> Iterator[TestClient]:
    """The service with the planners themselves, in this process."""
    app = create_app(Settings(database_url=sqlite_url), solve=solve_here)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def test_every_planner_has_a_version() -> None:
    assert solvers.VERSIONS.keys() == solvers.PLANNERS.keys()


def test_the_same_request_to_a_new_version_is_a_new_plan_beside_the_old_one(
    service: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.post("/v1/profiles", json=profile_document())
    service.post("/v1/clusters", json=asdict(CLUSTER))
    asked = request_document(planner="gpipe")
    monkeypatch.setitem(solvers.VERSIONS, "gpipe", FIRST_VERSION)
    first = service.post("/v1/plans", json=asked)
    assert (first.status_code, service.post("/v1/plans", json=asked).status_code) == (201, 200)
    assert "planner_version" not in first.json()
    monkeypatch.setitem(solvers.VERSIONS, "gpipe", "1.1.0")
    second, again = service.post("/v1/plans", json=asked), service.post("/v1/plans", json=asked)
    assert (second.status_code, again.status_code) == (201, 200)
    assert second.json()["planner_version"] == "1.1.0"
    listed = {plan["id"]: plan["planner_version"] for plan in service.get("/v1/plans").json()["items"]}
    assert listed == {first.json()["id"]: FIRST_VERSION, second.json()["id"]: "1.1.0"}
    assert "1.1.0" in service.get(f"/plans/{second.json()['id']}").text
