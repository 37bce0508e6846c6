"""The API's description: complete, and its examples work as they stand."""

import re
from collections.abc import Iterator
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


def test_every_schema_is_used_and_its_name_is_the_only_title(http: TestClient) -> None:
    """Generators name their classes by titles. Of two schemas with one title they take the first, or none."""
    description = _description(http)
    schemas = description["components"]["schemas"]
    assert set(schemas) == {one.removeprefix("#/components/schemas/") for one in _references(description)}
    titles = {name: list(_titles(schema)) for name, schema in schemas.items()}
    assert titles == {name: [name] for name in schemas}
    assert list(_titles(description["paths"])) == []
    assert all(re.fullmatch(r"[A-Za-z]+", name) for name in schemas), "a name that generators keep as it is"


def test_every_answer_has_a_schema(http: TestClient) -> None:
    for path, operations in _description(http)["paths"].items():
        for method, operation in operations.items():
            for status, response in operation["responses"].items():
                contents = response.get("content", {})
                assert bool(contents) != (status in ("204", "304")), f"{method} {path} {status}"
                for kind, content in contents.items():
                    assert content["schema"], f"{method} {path} {status} {kind}"
                    is_text = content["schema"].get("type") == "string"
                    assert is_text != kind.endswith("json"), f"{method} {path} {status} {kind}"


OPERATIONS = """
    cancel_job compare_plans complete_job create_cluster create_plan create_profile create_token delete_alias
    enqueue_job export_plan fail_job follow_job follow_run get_agent get_alias get_alias_history get_calibration
    get_cluster get_cluster_chart get_errors_chart get_health get_ids get_job get_metrics get_own_token get_plan
    get_plan_alternatives get_plan_chart get_plan_of_alias get_plan_request get_plan_streams get_plan_timeline
    get_plan_timeline_columns get_plan_trace get_profile get_profile_chart get_readiness get_run get_run_chart
    get_run_losses get_run_timeline get_run_timeline_columns get_run_trace get_throughput_chart get_token
    heartbeat_agent heartbeat_job lease_job list_agents list_aliases list_audit list_clusters list_jobs list_plans
    list_profiles list_runs list_tokens put_alias register_agent release_job retry_job revoke_token
"""


def test_the_ids_of_operations_stay_as_they_are(http: TestClient) -> None:
    """Generated clients name their functions by them."""
    paths = _description(http)["paths"].values()
    assert sorted(each["operationId"] for operations in paths for each in operations.values()) == OPERATIONS.split()


def test_headers_have_their_usual_names_and_tags_can_be_sent_back(http: TestClient) -> None:
    paths = _description(http)["paths"]
    headers = {
        parameter["name"]
        for operations in paths.values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "header"
    }
    assert headers == {"Idempotency-Key", "If-Match", "If-None-Match", "Last-Event-Id", "Prefer"}
    for operations in paths.values():
        for operation in operations.values():
            tagged = "304" in operation["responses"]
            assert tagged == ("ETag" in operation["responses"].get("200", {}).get("headers", ()))
            if tagged:
                assert "If-None-Match" in {parameter["name"] for parameter in operation["parameters"]}


def test_no_parameter_may_be_null(http: TestClient) -> None:
    for path, operations in _description(http)["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                schemas = [parameter["schema"], *parameter["schema"].get("anyOf", ())]
                assert all(None not in each.get("enum", ()) and "null" not in each.get("type", "") for each in schemas)
                assert any("type" in each for each in schemas), (path, parameter)


UNSAID = {
    "warnings",
    "planner_version",
    "choices",
    "form",
    "autocast",
    "precision",
    "tied",
    "basis",
    "recompute_modules",
    "replicate",
    "graphs",
    "a2a_overlap",
    "offload_share",
}
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


def _titles(node: Any) -> Iterator[str]:
    """The titles of schemas; what an example holds is no schema."""
    if isinstance(node, dict):
        yield from (title for title in [node.get("title")] if isinstance(title, str))
        yield from (title for key, each in node.items() if not key.startswith("example") for title in _titles(each))
    elif isinstance(node, list):
        yield from (title for each in node for title in _titles(each))


def test_the_model_of_the_examples_can_be_built() -> None:
    assert len(build_model(openapi.MODEL, seed=0, empty=True).blocks) == 6
