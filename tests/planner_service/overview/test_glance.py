"""The first page: the best plan of each model, its throughput over time, errors, what runs now and what failed."""

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import event, insert, select

from pipeplan.protocol.jobs import LeaseRequest
from pipeplan.protocol.plans import PlanSummary
from pipeplan.protocol.runs import RunSummary
from planner_service.jobs import service as jobs
from planner_service.overview import drawings, store
from planner_service.overview import service as overview
from planner_service.platform.context import Context
from planner_service.platform.tables import plans
from tests.planner_service.conftest import Clock
from tests.planner_service.dashboard_content import failed_run, finished_run
from tests.planner_service.examples import PROFILE_TASK, run_task, store_plan
from tests.planner_service.html_pages import Page

START = datetime(2026, 1, 1, tzinfo=UTC)
RATES = st.one_of(st.none(), st.floats(0, 1e9))
MOMENTS = st.integers(0, 10**8).map(lambda seconds: START + timedelta(seconds=seconds))


def _plan(at: datetime, rate: float | None) -> PlanSummary:
    known: dict[str, Any] = dict.fromkeys(PlanSummary.model_fields, 1) | {
        "id": "f" * 32,
        "model": "m",
        "created_at": at,
    }
    return PlanSummary.model_construct(**(known | {"throughput_samples_per_s": rate}))


def _run(at: datetime, predicted: float | None, measured: float | None) -> RunSummary:
    known: dict[str, Any] = dict.fromkeys(RunSummary.model_fields, "x") | {"created_at": at}
    return RunSummary.model_construct(
        **(known | {"predicted_samples_per_s": predicted, "measured_samples_per_s": measured})
    )


@given(st.lists(st.tuples(MOMENTS, RATES), max_size=30))
@example([(START, 1.0), (START, 1.0), (START, 0.5)])
@example([(START, 5e-324)])  # its power of ten was rounded to zero
def test_a_history_has_a_dot_for_every_played_plan_and_a_line_that_never_falls(
    made: list[tuple[datetime, float | None]],
) -> None:
    drawn = drawings.history([_plan(*one) for one in made])
    played = [(at, rate) for at, rate in made if rate is not None]
    if drawn is None:
        assert not played
        return
    assert len(drawn.dots) == len(played)
    assert (drawn.start, drawn.stop) == (min(at for at, _ in played), max(at for at, _ in played))
    assert drawn.highest_samples_per_s == max(rate for _, rate in played)
    assert all(0 < dot.x < 320 and 0 < dot.y < 84 for dot in drawn.dots)
    points = [tuple(map(float, point.split(","))) for point in drawn.best.split()]
    assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in pairwise(points))
    assert points[-1][1] == pytest.approx(min(dot.y for dot in drawn.dots), abs=0.06)


@given(st.lists(st.tuples(MOMENTS, st.floats(0.1, 1e6), st.floats(0.1, 1e6)), max_size=30))
def test_errors_stand_above_the_line_where_a_run_was_faster(made: list[tuple[datetime, float, float]]) -> None:
    drawn = drawings.errors([*(_run(*one) for one in made), _run(START, None, None)])
    if drawn is None:
        assert not made
        return
    in_order = sorted(made, key=lambda one: one[0])
    assert drawn.median == median(abs(measured / predicted - 1) for _, predicted, measured in made)
    assert abs(drawn.worst) <= drawn.scale
    assert len(drawn.dots) == len(made)
    assert all(a.x < b.x for a, b in pairwise(drawn.dots))
    if len({at for at, _, _ in made}) == len(made):
        for dot, (_, predicted, measured) in zip(drawn.dots, in_order, strict=True):
            error = measured / predicted - 1
            assert (dot.y - drawn.zero_y) * error <= 0
            assert dot.y != drawn.zero_y or abs(error) < 1e-9 * drawn.scale  # the last bits of a place


def _copies(context: Context, made: Sequence[tuple[str, int, float | None]]) -> None:
    """Stores a plan and copies of it under other models, ages and throughputs."""
    store_plan(context)
    with context.database.write() as connection:
        row = dict(connection.execute(select(plans)).one()._mapping)
        del row["sequence"]
        for place, (model, at_s, rate) in enumerate(made):
            changed = {"id": f"{place:032x}", "model_name": model, "throughput_samples_per_s": rate}
            moment = START + timedelta(seconds=at_s)
            connection.execute(insert(plans).values(**(row | changed | {"created_at": moment})))


MADE = [("b", 5, 7.0), ("a", 1, 3.0), ("a", 9, 2.0), ("a", 3, 8.0), ("c", 7, None), ("é", 8, 1.0), ("B", 2, 4.0)]


def test_the_newest_models_come_first_each_with_its_best_plan(context: Context) -> None:
    _copies(context, MADE)
    with context.database.read() as connection:
        assert store.newest_models(connection, 4) == ("gpt2-small-4", "a", "é", "c")
        assert set(store.newest_models(connection, 100)) == {"gpt2-small-4", *(model for model, _, _ in MADE)}
    best = {each.best.model: each.best.throughput_samples_per_s for each in overview.glance(context).models}
    assert best == {"gpt2-small-4": 60.0, "a": 8.0, "é": 1.0, "c": None, "b": 7.0, "B": 4.0}


def test_names_that_no_list_can_be_asked_for_are_left_out(context: Context) -> None:
    _copies(context, [("x" * 501, 9, 1.0), ("y" * 500, 9, 1.0)])
    assert [each.best.model for each in overview.glance(context).models] == ["gpt2-small-4", "y" * 500]


def test_a_glance_reads_plans_jobs_and_runs_off_indexes(context: Context) -> None:
    if not context.database.is_sqlite:
        pytest.skip("SQLite's plan of the query is looked at: PostgreSQL reads so small a table whole")
    _copies(context, MADE)
    explained: list[str] = []

    def explain(_connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith(("SELECT", "WITH")):
            rows = cursor.connection.execute("EXPLAIN QUERY PLAN " + statement, parameters).fetchall()
            explained.extend(row[3] for row in rows)

    event.listen(context.database.engine, "before_cursor_execute", explain)
    overview.glance(context)
    event.remove(context.database.engine, "before_cursor_execute", explain)
    assert any("ix_plans_model_name" in step for step in explained)
    scans = [step for step in explained if step.startswith(("SCAN plans", "SCAN jobs", "SCAN runs"))]
    # The first name is the first entry of an index.
    assert all("COVERING INDEX ix_plans_model_name" in step for step in scans), explained


def test_the_first_page_shows_errors_what_runs_and_what_failed(
    http: TestClient, context: Context, clock: Clock
) -> None:
    plan_id = store_plan(context)
    finished_run(context, plan_id)
    clock.advance(60)
    failed = failed_run(context, plan_id, "rank 1 ran out of memory at F3")
    leased = jobs.enqueue(context, run_task(plan_id))
    jobs.lease(context, LeaseRequest(agent="node-2"))
    waiting = jobs.enqueue(context, PROFILE_TASK)
    page = Page(http.get("/", headers={"Accept": "text/html"}).text)
    assert "At work 1 job" in page.text
    assert "Waiting 1 job" in page.text
    assert {f"/jobs/{leased.id}", f"/jobs/{waiting.id}", f"/runs/{failed}", f"/plans/{plan_id}"} <= set(page.links)
    assert "rank 1 ran out of memory at F3" in page.text
    assert "20.0 % median error of 1 run" in page.text
    assert "gpt2-small-4 60 samples/s" in page.text


def test_dead_and_failed_jobs_are_one_list_the_newest_first(context: Context, clock: Clock) -> None:
    plan_id = store_plan(context)
    expected = []
    for number in range(overview.JOBS + 2):
        clock.advance(60)
        expected.append(failed_run(context, plan_id, f"error {number}"))
    assert [job.run_id for job in overview.glance(context).failed] == expected[:1:-1]


def test_the_charts_of_the_first_page_are_tables_and_pictures(http: TestClient, context: Context) -> None:
    _copies(context, [("é&b", 5, 7.0), ("é&b", 9, 3.0), ("é&b", 7, None)])
    with context.database.read() as connection:
        plan_id = connection.execute(select(plans.c.id).where(plans.c.model_name == "gpt2-small-4")).scalar_one()
    run_id = finished_run(context, plan_id)
    page = Page(http.get("/", headers={"Accept": "text/html"}).text)
    addresses = [address for address in page.links if "/v1/overview/charts/" in address]
    assert [address.partition("?")[0].rpartition("/")[2] for address in addresses] == [
        f"{name}.{kind}" for name in ("throughput", "errors") for kind in ("csv", "svg")
    ]
    for address in addresses:
        answer = http.get(address).raise_for_status()
        assert http.get(address, headers={"If-None-Match": answer.headers["ETag"]}).status_code == 304
        name = "errors" if "errors" in address else "throughput"
        if ".csv" in address:
            rows = list(csv.DictReader(io.StringIO(answer.text)))
            expected = {"throughput": ["7.0", "3.0"], "errors": [run_id]}[name]
            assert [row["samples_per_s" if name == "throughput" else "run_id"] for row in rows] == expected
        else:
            dots = [each for each in ElementTree.fromstring(answer.text).iter() if each.tag.endswith("}circle")]
            assert len(dots) == {"throughput": 2, "errors": 1}[name]


def test_a_chart_of_nothing_is_refused_with_the_reason(http: TestClient) -> None:
    for address in ("errors.svg", "throughput.svg?model=none"):
        answer = http.get(f"/v1/overview/charts/{address}")
        assert answer.status_code == 422
        assert "cannot be drawn: there is no " in answer.text
        assert len(http.get(f"/v1/overview/charts/{address.replace('.svg', '.csv')}").text.splitlines()) == 1
    assert http.get("/v1/overview/charts/throughput.csv").status_code == 422
