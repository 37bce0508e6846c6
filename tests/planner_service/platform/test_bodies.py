"""Bodies that are no documents: one clear problem each, whatever is sent."""

import pytest
from fastapi.testclient import TestClient

JSON = {"Content-Type": "application/json"}
REQUEST = '{{"profile_id": "a", "cluster_id": "b", "planner": "gpipe", "batch_size": {}}}'


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("body", "field", "rule"),
    [
        ("", "document", "must be a JSON document, and is empty"),
        (" \n", "document", "must be a JSON document, and is empty"),
        ('{"profile_id": ', "document", "Invalid JSON"),
        ("[" * 100_000, "document", "nested at most 200 levels"),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "document", "nested at most 200 levels"),
        ("[]", "document", "must be an object"),
        ("null", "document", "must be an object"),
        (REQUEST.format("1e400"), "batch_size", "finite"),
        (REQUEST.format("9" * 5_000), "document", "number out of range"),
        (REQUEST.format("NaN"), "batch_size", "finite"),
        (REQUEST.format(1).replace('"a"', r'"a\u0000"'), "document", "null character"),
        (REQUEST.format(1).replace('"a"', r'"\ud800"'), "document", "Invalid JSON"),
    ],
)
def test_a_body_that_is_no_document_is_a_422_that_names_the_rule(
    http: TestClient, body: str, field: str, rule: str
) -> None:
    answer = http.post("/v1/plans", content=body.encode(), headers=JSON)
    assert answer.status_code == 422
    (broken,) = answer.json()["errors"]
    assert broken["field"] == field
    assert rule in broken["rule"]
    assert len(answer.content) < 2_000


def test_a_task_without_a_kind_is_told_so(http: TestClient) -> None:
    answer = http.post("/v1/jobs", content=b"{}", headers=JSON)
    assert answer.json()["errors"][0] == {"field": "kind", "rule": "is required", "value": None}


def test_a_backslash_before_such_a_text_is_no_null_character(http: TestClient) -> None:
    body = REQUEST.format(1).replace('"a"', r'"\\u0000"')
    answer = http.post("/v1/plans", content=body.encode(), headers=JSON)
    assert answer.json()["errors"][0]["field"] == "profile_id"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_another_type_of_content_is_a_415(http: TestClient, kind: str) -> None:
    answer = http.post("/v1/plans", content=b"{}", headers={"Content-Type": kind})
    assert (answer.status_code, answer.headers["content-type"]) == (415, "application/problem+json")
