"""The API's description: complete, and its examples work as they stand."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from planner_service.overview import openapi
from worker_agent.models.chain import build_model

EXAMPLES_IN_ORDER = ("/v1/profiles", "/v1/clusters", "/v1/plans", "/v1/jobs")


def _description(http: TestClient) -> dict[str, Any]:
    document: dict[str, Any] = http.get("/openapi.json").json()
    return document


def _examples(description: dict[str, Any], path: str) -> list[Any]:
    body = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return [example["value"] for example in body["examples"].values()]


@pytest.mark.each_case
def test_the_examples_can_be_posted_in_order(http: TestClient) -> None:
    description = _description(http)
    for path in EXAMPLES_IN_ORDER:
        for example in _examples(description, path):
            answer = http.post(path, json=example)
            assert answer.status_code == 201, f"{path}: {answer.text}"
    kinds = [job["task"]["kind"] for job in http.get("/v1/jobs").json()["items"]]
    assert kinds == ["run", "links", "profile"]


def test_an_agents_examples_work_with_the_token_of_its_lease(http: TestClient) -> None:
    description = _description(http)
    for verb in ("complete", "fail"):
        http.post("/v1/jobs", json=_examples(description, "/v1/jobs")[0])
        lease = http.post("/v1/jobs/lease", json=_examples(description, "/v1/jobs/lease")[0]).json()
        for action in ("heartbeat", verb):
            example = _examples(description, f"/v1/jobs/{{job_id}}/{action}")[0] | {"token": lease["token"]}
            answer = http.post(f"/v1/jobs/{lease['job']['id']}/{action}", json=example)
            assert answer.status_code == 200, answer.text


def test_every_operation_tells_what_it_does_and_which_problems_it_answers_with(http: TestClient) -> None:
    description = _description(http)
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], f"{method} {path}"
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert list(response["content"]) == ["application/problem+json"], f"{method} {path} {status}"


@pytest.mark.each_case
def test_every_post_with_a_body_describes_it(http: TestClient) -> None:
    description = _description(http)
    posts = {path for path, operations in description["paths"].items() if "post" in operations}
    assert {path for path in posts if "requestBody" not in description["paths"][path]["post"]} == {
        "/v1/jobs/{job_id}/cancel",
        "/v1/jobs/{job_id}/retry",
        "/v1/tokens/{token_id}/revoke",
    }


def test_every_reference_leads_to_a_schema(http: TestClient) -> None:
    description = _description(http)
    names = set(description["components"]["schemas"])
    for reference in _references(description):
        assert reference.removeprefix("#/components/schemas/") in names


UNSAID = {"warnings", "planner_version", "choices", "form", "autocast", "tied"}
"""Later fields of a plan, which are left out while they say nothing."""


def test_plan_answers_are_described_with_what_is_sent(http: TestClient) -> None:
    schemas = _description(http)["components"]["schemas"]
    for path in EXAMPLES_IN_ORDER[:3]:
        example = _examples(_description(http), path)[0]
        answer = http.post(path, json=example).json()
    described = schemas["PlanAnswer"]
    assert set(answer) == set(described["properties"]) - UNSAID
    assert set(described["required"]) <= set(answer)


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [reference for value in node.values() for reference in _references(value)]
    if isinstance(node, list):
        return [reference for value in node for reference in _references(value)]
    return []


def test_the_model_of_the_examples_can_be_built() -> None:
    assert len(build_model(openapi.MODEL, seed=0, empty=True).blocks) == 6
