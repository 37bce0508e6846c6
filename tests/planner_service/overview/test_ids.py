"""Ids by their heads, and what a plan was asked for with: what clients need to take short ids and to lock plans."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import insert

from pipeplan.protocol.plans import PlanRequest
from planner_service.access import service as tokens
from planner_service.overview.openapi import PLAN_REQUEST
from planner_service.overview.service import MOST_IDS
from planner_service.platform.context import Context
from planner_service.platform.tables import clusters
from tests.planner_service.examples import store_plan
from tests.planner_service.tokens import bearer, made


@pytest.mark.each_case
@pytest.mark.parametrize("length", [4, 10, 31, 32])
@pytest.mark.parametrize("noun", ["plan", "profile", "cluster"])
def test_an_id_is_found_by_its_head(http: TestClient, context: Context, noun: str, length: int) -> None:
    store_plan(context)
    stored = http.get(f"/v1/{noun}s").json()["items"][0]["id"]
    found = http.get("/v1/ids", params={"noun": noun, "prefix": stored[:length]}).json()
    assert found == {"ids": [stored], "more": False}
    other = ("0" if stored[3] != "0" else "1").join((stored[:3], stored[4:length]))
    assert http.get("/v1/ids", params={"noun": noun, "prefix": other}).json() == {"ids": [], "more": False}


def test_many_ids_of_one_head_are_the_first_in_order(http: TestClient, context: Context) -> None:
    ids = sorted([f"abcd{n:028x}" for n in range(MOST_IDS)] + ["abcdf" + "f" * 27, "abcd9" + "0" * 27])
    beside = ["abcc" + "f" * 28, "abce" + "0" * 28]
    with context.database.write() as connection:
        for one in ids + beside:
            row = {"id": one, "content": "{}", "device_name": "d", "devices": 1, "created_at": context.now()}
            connection.execute(insert(clusters).values(**row))
    found = http.get("/v1/ids", params={"noun": "cluster", "prefix": "abcd"}).json()
    assert found == {"ids": ids[:MOST_IDS], "more": True}
    assert http.get("/v1/ids", params={"noun": "cluster", "prefix": "abcdf"}).json()["ids"] == ids[-1:]


@pytest.mark.each_case
@pytest.mark.parametrize(
    "asked",
    [
        {"noun": "plan"},
        {"noun": "plan", "prefix": "abc"},
        {"noun": "x", "prefix": "abcd"},
        {"noun": "plan", "prefix": "ABCD"},
        {"noun": "plan", "prefix": "ab%_"},
    ],
)
def test_a_head_is_four_digits_at_least(http: TestClient, asked: dict[str, str]) -> None:
    assert http.get("/v1/ids", params=asked).status_code == 422


def test_the_head_of_an_id_stands_for_it_in_addresses(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    head = plan_id[:6]
    whole, short = (http.get(f"/v1/plans/{one}") for one in (plan_id, head))
    assert (short.status_code, short.content, short.headers["etag"]) == (200, whole.content, whole.headers["etag"])
    assert "immutable" in whole.headers["cache-control"]
    assert short.headers["cache-control"] == "private, no-cache", "another id may begin so tomorrow"
    assert http.get(f"/v1/plans/{head}/exports/torchrun").text == http.get(f"/v1/plans/{plan_id}/exports/torchrun").text
    assert plan_id in http.get(f"/plans/{head}", headers={"Accept": "text/html"}).text
    assert http.head(f"/v1/plans/{head}").status_code == 200
    job = http.post("/v1/jobs", json={"kind": "links", "devices": 1}).json()["id"]
    assert http.post(f"/v1/jobs/{job[:8]}/cancel").json()["state"] == "cancelled"
    for wrong in (plan_id[:3], "0" * 4, f"{head}x", head.upper() + "A"):
        assert http.get(f"/v1/plans/{wrong}").status_code == 404


def test_plans_are_compared_by_the_names_that_stand_for_them(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    assert http.put("/v1/aliases/team/gpt", json={"plan_id": plan_id}).status_code == 201
    by_ids, by_names = (
        http.get("/v1/plans/compare", params={"id": given}) for given in ([plan_id, plan_id], ["team/gpt", plan_id[:6]])
    )
    assert (by_names.status_code, by_names.content) == (200, by_ids.content)
    page = http.get("/compare", params={"plan": ["team/gpt", plan_id[:6]]}, headers={"Accept": "text/html"})
    assert page.status_code == 200 and plan_id in page.text
    unknown = http.get("/v1/plans/compare", params={"id": [plan_id, "nobody"]})
    assert (unknown.status_code, "nobody" in unknown.text) == (404, True)


def test_a_head_of_several_ids_is_refused_with_these(http: TestClient, context: Context) -> None:
    ids = ["abcd" + f"{n:028x}" for n in range(2)]
    with context.database.write() as connection:
        for one in ids:
            row = {"id": one, "content": "{}", "device_name": "d", "devices": 1, "created_at": context.now()}
            connection.execute(insert(clusters).values(**row))
    answer = http.get("/v1/clusters/abcd")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "id")
    assert all(one in answer.json()["detail"] for one in ids)
    page = http.get("/clusters/abcd", headers={"Accept": "text/html"})
    assert (page.status_code, page.headers["content-type"]) == (422, "text/html; charset=utf-8")
    assert all(one in page.text for one in ids)


def test_an_agents_token_finds_no_job_by_the_head_of_its_id(app: FastAPI, context: Context, http: TestClient) -> None:
    job = http.post("/v1/jobs", json={"kind": "links", "devices": 1}).json()["id"]
    headers = bearer(made(context, "agent"))
    assert http.get(f"/v1/jobs/{job}", headers=headers).status_code == 200
    assert http.get(f"/v1/jobs/{job[:8]}", headers=headers).status_code == 404


def test_a_token_is_revoked_by_the_head_of_its_id(context: Context) -> None:
    token_id = made(context, "read").split("_")[1]
    assert tokens.id_of(context, token_id[:6]) == token_id


def test_a_plan_says_what_it_was_asked_for_with(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    assert PlanRequest.model_validate(http.get(f"/v1/plans/{plan_id}/request").json()) == PLAN_REQUEST
    assert http.get(f"/v1/plans/{'0' * 32}/request").status_code == 404
