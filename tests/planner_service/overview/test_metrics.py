"""Metrics: what is counted, by labels of small closed sets, and what the database tells of at a scrape."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError

from pipeplan.errors import PipeplanError
from planner_service.jobs import service as jobs
from planner_service.platform.context import Context
from planner_service.platform.metrics import CACHED_S, Metrics, Stored
from tests.planner_service.examples import ANY_WORK, PROFILE_TASK
from tests.waiting import wait_until


def _samples(exposition: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(exposition):
        yield from family.samples


def _value(http: TestClient, name: str, **labels: str) -> float:
    """The sample's value at a scrape of now; 0 where there is no such sample."""
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = [s.value for s in _samples(answer.text) if s.name == name and labels.items() <= s.labels.items()]
    return sum(found)


def test_requests_are_counted_by_the_routes_template(http: TestClient) -> None:
    for plan_id in ("a", "b", "c"):
        http.get(f"/v1/plans/{plan_id}")
    labels = {"route": "/v1/plans/{plan_id}", "method": "GET"}
    assert _value(http, "pipeplan_http_requests_total", status="404", **labels) == 3
    assert _value(http, "pipeplan_http_request_duration_seconds_count", **labels) == 3


def test_what_a_caller_makes_up_adds_one_series_and_no_more(http: TestClient) -> None:
    for word in ("A", "B", "C"):
        http.request(f"SPY{word}", f"/nothing/{word}")
        http.request(f"SPY{word}", f"/v1/plans/{word}")
    exposition = http.get("/metrics").text
    assert "SPY" not in exposition
    routes = {s.labels["route"] for s in _samples(exposition) if s.name == "pipeplan_http_requests_total"}
    assert routes == {"unmatched", "/v1/plans/{plan_id}"}


def test_a_failure_of_the_service_is_counted_as_one(app: FastAPI, http: TestClient) -> None:
    def fail() -> None:
        raise KeyError("secret")

    app.add_api_route("/v1/broken", fail)
    http.get("/v1/broken")
    assert _value(http, "pipeplan_http_requests_total", route="/v1/broken", status="500") == 1


def test_the_queue_is_told_by_kind_and_state(http: TestClient, context: Context) -> None:
    for _ in range(3):
        jobs.enqueue(context, PROFILE_TASK)
    jobs.lease(context, ANY_WORK)
    exposition = list(_samples(http.get("/metrics").text))
    depths = {(s.labels["kind"], s.labels["state"]): s.value for s in exposition if s.name == "pipeplan_jobs"}
    assert depths == {("profile", "queued"): 2, ("profile", "leased"): 1}
    assert [s.value for s in exposition if s.name == "pipeplan_database_up"] == [1]


def test_two_applications_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.observe_solve("auto", 0.1)
    assert b'planner="auto"' in one.text()
    assert b'planner="auto"' not in other.text()


@pytest.mark.parametrize(("predicted", "measured", "counted"), [(110.0, 100.0, 1), (90.0, 100.0, 1), (1.0, 0.0, 0)])
def test_the_prediction_error_is_relative_to_what_was_measured(predicted: float, measured: float, counted: int) -> None:
    metrics = Metrics()
    metrics.observe_prediction(predicted=predicted, measured=measured)
    values = {s.name: s.value for s in _samples(metrics.text().decode()) if "prediction" in s.name}
    assert values["pipeplan_prediction_error_ratio_count"] == counted
    assert values["pipeplan_prediction_error_ratio_sum"] == pytest.approx(0.1 * counted)


def test_the_database_is_read_once_for_scrapes_that_follow_each_other() -> None:
    now_s, reads = [0.0], []

    def read() -> Stored:
        reads.append(now_s[0])
        return Stored(jobs={("run", "queued"): len(reads)}, agents_alive=2)

    metrics = Metrics()
    metrics.watch_stored(read, lambda: now_s[0])
    first, second = metrics.text(), metrics.text()
    now_s[0] = CACHED_S
    third = metrics.text()
    assert reads == [0.0, CACHED_S]
    assert b'pipeplan_jobs{kind="run",state="queued"} 1.0' in first
    assert b'pipeplan_jobs{kind="run",state="queued"} 1.0' in second
    assert b'pipeplan_jobs{kind="run",state="queued"} 2.0' in third
    assert b"pipeplan_agents_alive 2.0" in third


def test_without_its_database_the_service_still_tells_of_itself() -> None:
    metrics = Metrics()
    metrics.watch_stored(lambda: None)
    exposition = metrics.text()
    assert b"pipeplan_database_up 0.0" in exposition
    assert b"pipeplan_agents_alive" not in exposition
    assert b"pipeplan_build_info" in exposition


def test_what_the_database_refuses_is_counted(http: TestClient, context: Context) -> None:
    with pytest.raises((PipeplanError, DatabaseError)), context.database.read() as connection:
        connection.execute(text("SELECT * FROM no_such_table"))
    assert _value(http, "pipeplan_database_errors_total") == 1


def test_connections_in_use_are_told(http: TestClient, context: Context) -> None:
    """What the service does on a schedule may hold one for a moment, too."""
    with context.database.read(), context.database.read():
        wait_until(lambda: _value(http, "pipeplan_database_connections_in_use") == 2)
    wait_until(lambda: _value(http, "pipeplan_database_connections_in_use") == 0)


def test_the_documentation_names_every_metric() -> None:
    written = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    metrics = Metrics()
    metrics.watch_stored(lambda: Stored(jobs={("run", "queued"): 1}))
    families = list(text_string_to_metric_families(metrics.text().decode()))
    names = {f"{family.name}{'_total' * (family.type == 'counter')}" for family in families}
    assert [name for name in names if name.startswith("pipeplan") and f"`{name}`" not in written] == []
