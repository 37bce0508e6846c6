"""Logs: one line an event whatever it holds, the request's id in every one, secrets in none."""

import io
import json
import logging
import os
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pipeplan.protocol.tokens import masked
from planner_service.platform.logs import REQUEST_ID, HumanFormatter, JsonFormatter, LineHandler, is_json

AWKWARD = "a\nb\r\x1b[31mred\x00\x7f\u2028\u0085 end"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged as JSON, by line."""
    written: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            """Keeps the line."""
            written.append(self.format(record))

    handler, root = Collecting(), logging.getLogger()
    handler.setFormatter(JsonFormatter())
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


def _record(text: str, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("pipeplan", logging.INFO, "", 0, text, None, None)
    record.fields = fields
    return record


@pytest.mark.parametrize("formatter", [JsonFormatter(), HumanFormatter()])
def test_control_characters_never_break_a_line(formatter: logging.Formatter) -> None:
    line = formatter.format(_record(AWKWARD, name=AWKWARD))
    assert line.isprintable()
    assert line.count("[31mred") == 2


def test_a_json_line_says_back_what_was_logged() -> None:
    described = json.loads(JsonFormatter().format(_record(AWKWARD, caller=AWKWARD, status=200)))
    assert (described["event"], described["caller"], described["status"]) == (AWKWARD, AWKWARD, 200)
    assert described["time"].endswith("Z")


def test_a_traceback_stays_in_its_json_line_and_is_marked_for_people() -> None:
    try:
        raise ValueError("first\nINFO forged line")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "it failed", None, (type(error), error, None))
    assert "\n" not in JsonFormatter().format(record)
    first, *others = HumanFormatter().format(record).splitlines()
    assert first.endswith("it failed")
    assert others
    assert all(line.startswith("  | ") for line in others)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer ***"),
        ("postgresql://me:pass-word@host/db", "postgresql://me:***@host/db"),
        ("password=hunter2 host=x", "password=*** host=x"),
        ("sqlite:////var/lib/x.sqlite3", "sqlite:////var/lib/x.sqlite3"),
        ("http://127.0.0.1:8437/v1/plans", "http://127.0.0.1:8437/v1/plans"),
    ],
)
def test_secrets_are_masked_in_the_lines_of_the_log(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert json.loads(JsonFormatter().format(_record(text)))["event"] == shown


def test_a_request_is_one_line_with_its_route_status_id_and_caller(http: TestClient, lines: list[str]) -> None:
    http.get("/v1/plans/a-very-own-id", headers={"X-Request-ID": "ci-17"})
    (line,) = [json.loads(line) for line in lines if "pipeplan.access" in line]
    assert {key: line[key] for key in ("method", "route", "status", "request_id")} == {
        "method": "GET",
        "route": "/v1/plans/{plan_id}",
        "status": 404,
        "request_id": "ci-17",
    }
    assert line["duration_ms"] >= 0
    assert "caller" in line
    assert "a-very-own-id" not in str(line)


def test_an_unforeseen_failure_is_logged_with_its_traceback_and_answered_without_it(
    app: FastAPI, http: TestClient, lines: list[str]
) -> None:
    def fail() -> None:
        raise KeyError("inside")

    app.add_api_route("/v1/broken", fail)
    answer = http.get("/v1/broken", headers={"X-Request-ID": "r-1"})
    assert (answer.status_code, answer.headers["x-request-id"], answer.json()["request_id"]) == (500, "r-1", "r-1")
    assert "inside" not in answer.text
    (failure,) = [json.loads(line) for line in lines if "traceback" in line]
    assert failure["request_id"] == "r-1"
    assert "KeyError: 'inside'" in failure["traceback"]


@pytest.mark.each_case
@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "-leading", "evil\\u000a", "{}", "é"])
def test_an_id_that_is_no_plain_word_is_replaced(http: TestClient, given: str) -> None:
    assigned = http.get("/healthz", headers={b"X-Request-ID": given.encode()}).headers["x-request-id"]
    assert len(assigned) == 32
    assert assigned.isalnum()


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("PUT", "/v1/plans", 405), ("POST", "/v1/jobs", 415)]
)
def test_answers_that_no_route_made_have_an_id_too(http: TestClient, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_a_guarded_request_has_an_id_too(http: TestClient) -> None:
    answer = http.get("/v1/plans", headers={"Host": "evil.example"})
    assert answer.status_code == 403
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_a_reader_who_stalls_stops_nobody() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream:
        handler = LineHandler(stream, most_lines=10)
        for _ in range(20):
            handler.emit(_record("x" * 50_000))
        assert handler.dropped > 0
        with os.fdopen(read_end, "r") as reader:
            first = reader.readline()
        handler.close()
    assert first.startswith("x" * 100)


def test_lines_are_written_before_the_handler_is_closed() -> None:
    stream = io.StringIO()
    handler = LineHandler(stream)
    token = REQUEST_ID.set("r-2")
    handler.setFormatter(HumanFormatter())
    handler.emit(_record("it happened", blocks=3))
    REQUEST_ID.reset(token)
    handler.close()
    assert stream.getvalue().endswith("info    it happened request_id=r-2 blocks=3\n")


def test_plain_text_is_for_terminals_alone_unless_it_is_asked_for() -> None:
    stream = io.StringIO()
    assert is_json("auto", stream)
    assert is_json("json", stream)
    assert not is_json("human", stream)
