"""Hostile requests: every address, parameter and field of a body, on every route and page, is answered by a sentence.

The service never fails (500), no answer's headers hold what the request put there, and a problem names field and rule.
"""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.identity import content_id
from planner_service.overview.openapi import BODIES, CLUSTER, PROFILE
from planner_service.platform.context import Context
from tests.planner_service.examples import store_plan

pytestmark = pytest.mark.campaign

JSON = {"Content-Type": "application/json"}
ADDRESSES = (
    *("%00", "a%00b", "%ff", "%ed%a0%80", "%F0%9F%98%80", "%E2%80%AE", "%0d%0aX-Evil:1", "..%2f..", "%25%30%30"),
    *("", "x" * 3000, "-1", "9" * 40, "1e999", "NaN", "1;2", "%27%22%3E", "eyJ9", "0" * 4, "a" * 32, "A" * 32),
    *("0001-01-01T00:00:00Z", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00%2B14:00", "2026-02-30"),
)
VALUES = (
    *(r'"a\u0000b"', r'"\ud800"', r'"\u202eabc"', '"e\u0301"', '"=1+1"', '"../../x"', '""', '" "', f'"{"x" * 5000}"'),
    *("1e308", "1e400", "5e-324", "-0.0", "NaN", "Infinity", "0", "-1", "1.5", "1" + "0" * 30, "-9223372036854775809"),
    *("9223372036854775807", "2147483648", "null", "true", '"1"', "[]", "{}", "[[[[[]]]]]", '{"a": {"a": {}}}'),
)
PAGES = (
    *("", "profiles", "clusters", "plans", "jobs", "runs", "aliases", "agents", "audit"),
    *("plans/new", "plans/compare", "runs/calibrate", "login"),
)
FIELDS = (
    *("cursor", "limit", "sort", "state", "kind", "model", "run", "id", "ids", "batch_size", "profile_id", "plan_id"),
    *("across", "down", "batches", "microbatches", "created_after", "tolerance", "next", "actor", "since"),
)
"""Query parameters of the pages, of whichever page they are."""


@pytest.fixture
def ids(http: TestClient, context: Context) -> dict[str, str]:
    """Something of each noun that can be stored at once."""
    plan_id = store_plan(context)
    http.put("/v1/aliases/prod", json={"plan_id": plan_id}).raise_for_status()
    job = http.post("/v1/jobs", json={"kind": "links", "devices": 1}).raise_for_status().json()["id"]
    found = {"profiles": content_id(PROFILE), "clusters": content_id(CLUSTER), "plans": plan_id}
    return found | {"aliases": "prod", "jobs": job}


def _answer(http: TestClient, method: str, address: str, accept: str, body: str | None = None) -> None:
    headers = {"Accept": accept} | (JSON if body is not None else {})
    content = None if body is None else body.encode("utf-8", "surrogatepass")
    answer = http.request(method, address, headers=headers, content=content, follow_redirects=False)
    assert answer.status_code < 500, (method, address[:200], (body or "")[:200], answer.text[:300])
    assert all(value.isascii() and value.isprintable() for value in answer.headers.values()), answer.headers
    assert "x-evil" not in answer.headers
    if answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json":
        for error in answer.json()["errors"]:
            assert set(error) == {"field", "rule", "value"}


def _routes(http: TestClient) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in http.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            if not path.endswith("/events"):  # of a job that is there they go on until it has ended
                yield path, method, operation


def _filled(path: str, ids: dict[str, str], **chosen: str) -> str:
    noun = path.split("/")[2] if path.count("/") > 1 else ""
    known = {"chart": "stages", "kind": "csv", "format_name": "torchrun"} | chosen
    return re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], ids.get(noun, "a" * 32)), path)


@pytest.mark.parametrize("hostile", ADDRESSES)
def test_no_part_of_an_address_makes_the_service_fail(http: TestClient, ids: dict[str, str], hostile: str) -> None:
    """A null character was a 500 on PostgreSQL; the degrees of a chart's map got into a header as they were."""
    for path, method, operation in _routes(http):
        body = "{}" if method in ("post", "put") else None
        for name in re.findall(r"\{(\w+)\}", path):
            _answer(http, method.upper(), _filled(path, ids, **{name: hostile}), "application/json", body)
        named = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
        for name in named if method == "get" else ():
            _answer(http, "GET", f"{_filled(path, ids)}?{name}={hostile}", "application/json")


@pytest.mark.parametrize("hostile", ADDRESSES)
def test_no_part_of_a_pages_address_makes_it_fail(http: TestClient, ids: dict[str, str], hostile: str) -> None:
    """A batch of NaN samples was a 500."""
    for page in (*PAGES, *(f"{noun}/{one}" for noun, one in ids.items())):
        for field in FIELDS:
            _answer(http, "GET", f"/{page}?{field}={hostile}", "text/html")
    for noun in (*ids, "runs", "agents"):
        _answer(http, "GET", f"/{noun}/{hostile}", "text/html")


def _places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all that is in a document, of lists the first item's alone."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _places(inner, (*path, name))
    elif isinstance(value, list) and value:
        yield from _places(value[0], (*path, 0))


def _replaced(document: Any, path: tuple[str | int, ...], value: str) -> str:
    """The document as JSON with this JSON at the path."""
    if not path:
        return value
    changed = deepcopy(document)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = "VALUE-HERE"
    return json.dumps(changed).replace('"VALUE-HERE"', value)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_no_field_of_a_body_makes_the_service_fail(http: TestClient, ids: dict[str, str], path: str) -> None:
    method = "put" if "aliases" in path else "post"
    operation = http.get("/openapi.json").json()["paths"][path][method]
    for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
        for place in _places(example["value"]):
            for value in VALUES:
                body = _replaced(example["value"], place, value)
                _answer(http, method.upper(), _filled(path, ids), "application/json", body)


def test_a_body_that_is_compressed_is_refused_by_name(http: TestClient) -> None:
    answer = http.post("/v1/profiles", content=b"\x1f\x8b", headers=JSON | {"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["detail"]) == (415, "the body must be sent uncompressed")


def test_a_null_character_in_a_form_is_refused_at_its_field(http: TestClient) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": "http://127.0.0.1", "Accept": "text/html"}
    answer = http.post("/plans/new", content="profile_id=%00&planner=auto", headers=form)
    assert answer.status_code == 422
    assert "null character" in answer.text


@pytest.mark.parametrize("end", ["%0a", "%0d", "%0d%0a", "%09", "%7f", "%c2%85", "%e2%80%a8"])
def test_an_address_with_a_control_character_is_nothings(http: TestClient, ids: dict[str, str], end: str) -> None:
    """A route's pattern ended before a line's end: a PUT to /v1/aliases/a%0a moved a, and one to /v1/jobs%0a worked."""
    for path, method, _ in _routes(http):
        body = "{}" if method in ("post", "put") else None
        answer = http.request(method.upper(), _filled(path, ids) + end, headers=JSON, content=body)
        assert answer.status_code == 404, path
    target = {"plan_id": ids["plans"]}
    assert http.put(f"/v1/aliases/moved{end}", json=target).status_code == 404
    assert http.get("/v1/aliases/moved").status_code == 404
