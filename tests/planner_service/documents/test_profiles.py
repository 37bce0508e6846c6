"""Profiles over HTTP: stored by content, refused with field, rule and value."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.files import parse
from pipeplan.documents.identity import canonical_json, content_id
from pipeplan.documents.profile import Profile
from planner_service.documents.drawings import LEFT, RIGHT, BlockColumn, time_chart
from planner_service.overview.openapi import PROFILE
from tests.planner_service.examples import profile_document


def _broken_rule(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["type"] == "urn:pipeplan:problem:invalid-input"
    rules: list[dict[str, Any]] = problem["errors"]
    assert len(rules) == 1
    return rules[0]


def _block(**changes: Any) -> dict[str, Any]:
    block: dict[str, Any] = profile_document()["blocks"][0]
    return block | changes


def test_a_profile_comes_back_as_it_was_stored(http: TestClient) -> None:
    created = http.post("/v1/profiles", json=profile_document())
    assert created.status_code == 201
    assert created.headers["location"] == f"/v1/profiles/{content_id(PROFILE)}"
    document = http.get(created.headers["location"])
    assert document.text == canonical_json(PROFILE)
    assert parse(Profile, document.content) == PROFILE


def test_the_same_content_is_stored_once_however_it_is_written(http: TestClient) -> None:
    first = http.post("/v1/profiles", json=profile_document())
    reordered = dict(reversed(profile_document().items()))
    second = http.post("/v1/profiles", json=reordered)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json()
    assert len(http.get("/v1/profiles").json()["items"]) == 1


def test_columns_of_what_no_block_has_are_left_out(http: TestClient) -> None:
    """The packaged example's table had four empty columns, and went beyond the screen for them."""
    plain = _block()
    sizes = {"input_bytes": 4, "output_bytes": 4, "activation_bytes": 4}
    plain["measurements"] = [{"microbatch_size": 1, "forward_s": 1.0, "backward_s": 2.0} | sizes]
    halves = {"backward_input_s": 1.0, "backward_weight_s": 1.0, "forward_spread_s": 0.1, "backward_spread_s": 0.1}
    full = plain | {"measurements": [plain["measurements"][0] | halves]}
    for block, shown in ((plain, False), (full, True)):
        stored = http.post("/v1/profiles", json=profile_document(blocks=[block]))
        page = http.get(f"/profiles/{stored.json()['id']}", headers={"Accept": "text/html"}).text
        assert ("Backward, input" in page, page.count(">Spread<")) == (shown, 2 if shown else 0)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("document", "field", "rule"),
    [
        (profile_document(dtype="int3"), "dtype", "must be one of float64, float32, bfloat16, float16"),
        (profile_document(blocks=[]), "blocks", "must hold at least one block"),
        (profile_document(colour="red"), "colour", "is not a known key"),
        (profile_document(model={"name": " "}), "model.name", "must not be empty"),
        (profile_document(blocks=[_block(weight_bytes=-1)]), "blocks.0.weight_bytes", "at least 0"),
        (profile_document(blocks=[_block(weight_bytes="many")]), "blocks.0.weight_bytes", "a number, in the unit"),
        (profile_document(blocks=[_block(), _block()]), "blocks", "must not hold a name twice"),
        (profile_document(device={"name": "x"}), "device.memory_bytes", "is required"),
        (profile_document(blocks=[_block(weight_bytes=10**400)]), "blocks.0.weight_bytes", "must be at most 1e+24"),
        ([], "document", ""),
    ],
)
def test_a_wrong_profile_is_refused_and_not_stored(http: TestClient, document: Any, field: str, rule: str) -> None:
    broken = _broken_rule(http.post("/v1/profiles", json=document))
    assert broken["field"] == field
    assert rule in broken["rule"]
    assert http.get("/v1/profiles").json()["items"] == []


@pytest.mark.each_case
@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000])
def test_what_is_no_json_is_refused(http: TestClient, body: bytes) -> None:
    answer = http.post("/v1/profiles", content=body, headers={"Content-Type": "application/json"})
    assert len(_broken_rule(answer)["value"] or "") <= 200


@pytest.mark.each_case
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999"])
def test_times_that_are_not_finite_are_refused(http: TestClient, number: str) -> None:
    text = json.dumps(profile_document()).replace('"forward_s": 0.004', f'"forward_s": {number}', 1)
    answer = http.post("/v1/profiles", content=text, headers={"Content-Type": "application/json"})
    assert _broken_rule(answer)["field"].endswith("forward_s")


@pytest.mark.each_case
def test_lists_come_newest_first_a_page_at_a_time(http: TestClient) -> None:
    ids = [http.post("/v1/profiles", json=profile_document(model={"name": f"model{i}"})).json()["id"] for i in range(5)]
    first = http.get("/v1/profiles", params={"limit": 2}).json()
    second = http.get("/v1/profiles", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    third = http.get("/v1/profiles", params={"limit": 2, "cursor": second["next_cursor"]}).json()
    assert [item["id"] for page in (first, second, third) for item in page["items"]] == ids[::-1]
    assert third["next_cursor"] is None


@pytest.mark.each_case
@pytest.mark.parametrize("cursor", ["x", "-1", "1.5", "9" * 40, "²"])
def test_a_cursor_that_no_list_returned_is_refused(http: TestClient, cursor: str) -> None:
    assert _broken_rule(http.get("/v1/profiles", params={"cursor": cursor}))["field"] == "cursor"


@pytest.mark.each_case
@pytest.mark.parametrize("limit", ["0", "201", "many"])
def test_a_page_has_1_to_200_items(http: TestClient, limit: str) -> None:
    assert _broken_rule(http.get("/v1/profiles", params={"limit": limit}))["field"] == "limit"


def test_a_profile_that_does_not_exist_is_a_404(http: TestClient) -> None:
    answer = http.get("/v1/profiles/nothing")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "there is no profile nothing"


def test_the_one_bar_of_a_chart_stands_in_its_middle() -> None:
    """The cluster drawing in the same file once gave LEFT a second value, and the chart's bars and axis moved."""
    chart = time_chart([BlockColumn(name="only", parts=(("forward", 1.0),))])
    assert chart is not None
    (bar,) = chart.bars
    assert bar.x + bar.width / 2 == pytest.approx((84.0 + 1150.0) / 2) == pytest.approx((LEFT + RIGHT) / 2)
