"""Problem details: every error has a status, none is a traceback, and the client gets back what was raised."""

import logging
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pipeplan import errors
from pipeplan.errors import InvalidInputError, PipeplanError, ServiceError
from pipeplan.protocol.problems import KINDS, Problem, error_of, problem_of
from planner_service.platform.migrations import head


def _all_errors(root: type[PipeplanError] = PipeplanError) -> Iterator[type[PipeplanError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _all_errors(child)


@pytest.mark.parametrize("error", list(_all_errors()))
def test_every_error_is_mapped(error: type[PipeplanError]) -> None:
    assert error in KINDS


def test_no_two_errors_share_a_type() -> None:
    slugs = [kind.slug for kind in KINDS.values()]
    assert len(set(slugs)) == len(slugs)


@pytest.mark.parametrize("error", [e for e in _all_errors() if e not in (InvalidInputError, PipeplanError)])
def test_an_error_comes_back_as_it_was_raised(error: type[PipeplanError]) -> None:
    returned = error_of(problem_of(error("it went wrong")))
    assert type(returned) is error
    assert str(returned) == "it went wrong"


def test_invalid_input_comes_back_with_field_rule_and_value() -> None:
    raised = InvalidInputError("blocks.0", "must be short", "long")
    returned = error_of(Problem.model_validate_json(problem_of(raised).model_dump_json()))
    assert isinstance(returned, InvalidInputError)
    assert (returned.field, returned.rule, returned.value) == ("blocks.0", "must be short", "long")


def test_a_problem_of_nobodys_kind_is_a_service_error() -> None:
    returned = error_of(Problem(title="Bad Gateway", status=502, detail="no"))
    assert isinstance(returned, ServiceError)


@pytest.mark.parametrize("value", [float("nan"), object(), "x" * 10_000, b"\xff" * 999, {"a": [1]}, 1, None, True])
def test_a_value_is_shown_short_whatever_it_is(value: object) -> None:
    problem = problem_of(InvalidInputError("field", "rule", value))
    assert len(problem.model_dump_json()) < 1000


def test_an_unknown_path_and_method_are_problems(http: TestClient) -> None:
    assert http.get("/v1/nothing").headers["content-type"] == "application/problem+json"
    answer = http.request("DELETE", "/v1/plans")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")
    assert answer.json()["title"] == "Method Not Allowed"
    assert http.post("/").headers["allow"] == "GET, HEAD"
    assert http.request("PUT", "/v1/jobs/lease").headers["allow"] == "POST"
    assert http.request("PUT", "/v1/jobs/some").headers["allow"] == "GET, HEAD"


def test_a_body_beyond_the_limit_is_refused_declared_or_not(http: TestClient) -> None:
    large = b" " * (2**20 + 1)
    headers = {"Content-Type": "application/json"}
    declared = http.post("/v1/profiles", content=large, headers=headers)
    streamed = http.post("/v1/profiles", content=iter([large]), headers=headers)
    for answer in (declared, streamed):
        assert answer.status_code == 413
        assert "at most 1048576 bytes" in answer.json()["detail"]


def test_a_body_that_is_not_sent_as_json_is_refused(http: TestClient) -> None:
    answer = http.post("/v1/jobs", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.headers["content-type"]) == (415, "application/problem+json")


def test_pages_of_other_sites_are_kept_out(http: TestClient) -> None:
    foreign_name = http.get("/v1/plans", headers={"Host": "evil.example"})
    foreign_page = http.post("/v1/jobs/x/cancel", headers={"Origin": "https://evil.example"})
    own_page = http.get("/v1/plans", headers={"Host": "localhost:8437", "Origin": "http://localhost:8437"})
    assert (foreign_name.status_code, foreign_page.status_code, own_page.status_code) == (403, 403, 200)
    assert foreign_name.json()["title"] == "Forbidden"


def test_an_unforeseen_error_is_a_problem_without_a_traceback(
    app: FastAPI, http: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise KeyError("secret")

    app.add_api_route("/v1/broken", fail)
    with caplog.at_level(logging.CRITICAL):
        answer = http.get("/v1/broken")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text


def test_healthz_says_ok_and_readyz_the_revision_of_the_tables_too(http: TestClient) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ok", "revision": head()}


@pytest.mark.each_case
@pytest.mark.parametrize(
    "path",
    [
        "/v1/plans",
        "/v1/plans/0",
        "/v1/plans/compare",
        "/v1/jobs/0/cancel",
        "/v1/tokens/self",
        "/v1/aliases/gpt/history",
        "/plans/new",
        "/healthz",
    ],
)
def test_a_wrong_method_is_answered_with_those_that_work(http: TestClient, path: str) -> None:
    allowed = set(http.request("TRACE", path).headers["Allow"].split(", "))
    assert allowed
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
        assert (http.request(method, path).status_code != 405) is (method in allowed), method
