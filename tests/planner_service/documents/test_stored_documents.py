"""Stored documents that are large are read by solvers and parsers: a short request may name one of many megabytes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents import files as documents
from planner_service.app import create_app
from planner_service.documents.service import clusters, profiles
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.platform.context import Context
from planner_service.platform.parsing import SMALL_STORED
from planner_service.platform.settings import Settings
from tests.planner_service.examples import request_document

BLOCKS = 4000


@pytest.fixture
def service(sqlite_url: str) -> Iterator[TestClient]:
    """The service with its real solvers and parsers."""
    with TestClient(create_app(Settings(database_url=sqlite_url)), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def asked(service: TestClient) -> dict[str, Any]:
    """A request for a plan of a large profile, which is stored."""
    context: Context = service.app.state.context  # type: ignore[attr-defined]
    blocks = tuple(replace(PROFILE.blocks[0], name=f"block{n}", weight_bytes=4) for n in range(BLOCKS))
    profile, _ = profiles.create(context, replace(PROFILE, blocks=blocks))
    assert len(profiles.document(context, profile.id)) > SMALL_STORED
    clusters.create(context, CLUSTER)
    return request_document(profile_id=profile.id, planner="pipedream-2bw")


@pytest.fixture
def sizes(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the documents that the service's own process reads."""
    del asked  # it is stored before
    seen: list[int] = []
    validated = documents._validated

    def watched(kind: type[Any], text: str | bytes, *, repeated_keys: bool) -> Any:
        seen.append(len(text))
        return validated(kind, text, repeated_keys=repeated_keys)

    monkeypatch.setattr(documents, "_validated", watched)
    return seen


def test_what_names_a_large_profile_reads_it_in_another_process(
    service: TestClient, asked: dict[str, Any], sizes: list[int]
) -> None:
    answered = service.post("/v1/plans", json=asked)
    assert answered.status_code == 201, answered.text
    plan_id = answered.json()["id"]
    as_job = service.post("/v1/plans", json=asked, headers={"Prefer": "respond-async, wait=60"})
    assert (as_job.status_code, as_job.json()["id"]) == (201, plan_id)
    assert service.get(f"/v1/plans/{plan_id}/exports/torchrun").status_code == 200
    assert service.get(f"/plans/{plan_id}").status_code == 200
    assert service.get(f"/profiles/{asked['profile_id']}").status_code == 200
    assert sizes
    assert max(sizes) <= SMALL_STORED


@pytest.mark.parametrize("headers", [{}, {"Prefer": "respond-async"}], ids=["at once", "as a job"])
def test_what_a_large_profile_does_not_go_with_is_refused_before_it_is_a_job(
    service: TestClient, asked: dict[str, Any], headers: dict[str, str]
) -> None:
    twice = asked | {"other_profile_ids": [asked["profile_id"]]}
    answered = service.post("/v1/plans", json=twice, headers=headers)
    assert answered.status_code == 422
    assert "other_profiles" in answered.text
    assert service.get("/v1/jobs").json()["items"] == []
