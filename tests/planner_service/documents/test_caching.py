"""Caching over HTTP: entity tags, 304, HEAD; and the cache of documents behind it."""

from dataclasses import asdict
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import delete, update

from planner_service.overview.openapi import CLUSTER
from planner_service.plans import service as stored_plans
from planner_service.platform.context import Context
from planner_service.platform.stored import ENTRY_BYTES, DocumentCache
from planner_service.platform.tables import clusters, plans, profiles
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import profile_document, store_plan


@pytest.fixture
def paths(http: TestClient, context: Context) -> list[str]:
    """Where a profile, a cluster and a plan are."""
    profile = http.post("/v1/profiles", json=profile_document()).headers["location"]
    cluster = http.post("/v1/clusters", json=asdict(CLUSTER)).headers["location"]
    return [profile, cluster, f"/v1/plans/{store_plan(context)}"]


@pytest.mark.each_case
def test_documents_are_immutable_and_their_ids_are_their_tags(http: TestClient, paths: list[str]) -> None:
    for path in paths:
        read, ready = http.get(path), http.get(path)
        assert read.headers["etag"] == f'"{path.rpartition("/")[2]}"'
        assert read.headers["cache-control"] == "private, max-age=31536000, immutable"
        assert (ready.content, ready.headers["etag"]) == (read.content, read.headers["etag"])
        assert ready.headers["content-type"] == "application/json"


@pytest.mark.each_case
@pytest.mark.parametrize("known", ["{tag}", "W/{tag}", '"other", {tag}', "*"])
def test_whoever_has_the_document_is_told_so(http: TestClient, paths: list[str], known: str) -> None:
    for path in paths:
        for _ in range(2):  # as it is read, and as it lies ready
            tag = f'"{path.rpartition("/")[2]}"'
            answer = http.get(path, headers={"If-None-Match": known.format(tag=tag)})
            assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
            other = http.get(path, headers={"If-None-Match": '"other"'})
            assert other.status_code == 200


def test_a_tag_does_not_make_a_document_exist(http: TestClient) -> None:
    for noun in ("profiles", "clusters", "plans"):
        identity = "0" * 32
        known = {"If-None-Match": f'"{identity}"'}
        assert http.get(f"/v1/{noun}/{identity}", headers=known).status_code == 404


def test_what_is_made_of_a_plan_has_a_tag_by_its_parameters(http: TestClient, paths: list[str]) -> None:
    tags = set()
    for path in ("streams?batches=1", "streams?batches=2", "timeline?batches=1", "trace?batches=1", "alternatives"):
        answer = http.get(f"{paths[2]}/{path}")
        tag = answer.headers["etag"]
        tags.add(tag)
        assert http.get(f"{paths[2]}/{path}", headers={"If-None-Match": tag}).status_code == 304
    assert len(tags) == 5


def test_head_answers_as_get_without_the_content(http: TestClient, paths: list[str]) -> None:
    for path in (*paths, "/v1/plans", f"{paths[2]}/streams", "/healthz", "/v1/nothing"):
        got, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        for name in ("etag", "content-length", "content-type"):
            assert head.headers.get(name) == got.headers.get(name), path


def test_the_cache_is_not_asked_whether_a_document_is_still_there_for_long(
    http: TestClient, context: Context, paths: list[str]
) -> None:
    for path in paths:
        http.get(path)
    with context.database.write() as connection:
        for table in (plans, clusters, profiles):
            connection.execute(delete(table))
    assert http.get("/v1/plans", params={"content": "true"}).json()["items"] == []
    context.documents._max_age_s = -1.0
    for path in paths:
        assert http.get(path).status_code == 404


def test_the_cache_holds_so_many_bytes_of_what_was_asked_for_last() -> None:
    cache = DocumentCache(max_bytes=8 * (10 + ENTRY_BYTES))
    for name in "abcdefgh":
        cache.put("plans", name, b"x" * 10)
    assert cache.get("plans", "a") is not None
    cache.put("plans", "i", b"x" * 10)
    assert cache.get("plans", "b") is None
    assert cache.get("plans", "a") is not None
    assert cache.get("profiles", "a") is None
    cache.put("plans", "large", b"x" * 11)
    assert cache.get("plans", "large") is None
    assert cache.known("plans", ["a", "b", "i"]) == {"a": b"x" * 10, "i": b"x" * 10}


def test_the_cache_forgets_that_a_document_is_there_but_not_what_it_is() -> None:
    moment = 0.0
    cache = DocumentCache(max_age_s=30.0, now_s=lambda: moment)
    cache.put("plans", "a", b"content")
    moment = 31.0
    assert cache.get("plans", "a") is None
    assert cache.known("plans", ["a"]) == {"a": b"content"}
    cache.put("plans", "a", b"content")
    assert cache.get("plans", "a") == b"content"


def test_a_list_shows_the_plan_that_is_stored_and_not_the_one_that_was(
    http: TestClient, context: Context, clock: Clock
) -> None:
    plan_id = store_plan(context)
    first = http.get("/v1/plans").json()["items"]
    assert first == http.get("/v1/plans").json()["items"] == [_summary(context, plan_id)]
    with context.database.write() as connection:
        connection.execute(delete(plans))
    assert http.get("/v1/plans").json()["items"] == []

    clock.advance(60.0)
    assert store_plan(context) == plan_id
    (again,) = http.get("/v1/plans").json()["items"]
    assert again == _summary(context, plan_id)
    assert again["created_at"] > first[0]["created_at"]


def test_a_list_shows_a_play_that_was_added(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    unplayed = {"throughput_samples_per_s": None, "bubble_fraction": None}
    with context.database.write() as connection:
        connection.execute(update(plans).values(unplayed))
    for _ in range(2):
        assert http.get("/v1/plans").json()["items"][0]["throughput_samples_per_s"] is None
    with context.database.write() as connection:
        connection.execute(update(plans).values(throughput_samples_per_s=17.0, bubble_fraction=0.5))
    (item,) = http.get("/v1/plans").json()["items"]
    assert (item["throughput_samples_per_s"], item["bubble_fraction"]) == (17.0, 0.5)
    assert item == _summary(context, plan_id)


def _summary(context: Context, plan_id: str) -> dict[str, Any]:
    return stored_plans.summary(context, plan_id).model_dump(mode="json")
