"""The page of a run: the last batches, predicted over measured, and their files."""

import csv
import io
import json
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.files import parse
from pipeplan.protocol.runs import OverlayColumns
from planner_service.platform.context import Context
from tests.planner_service.dashboard_content import failed_run, finished_run
from tests.planner_service.examples import store_plan

SLOWER = 1.25
"""How many times as long as predicted the examples' run takes."""


@pytest.fixture
def run_id(context: Context) -> str:
    """A run of four batches that has succeeded."""
    return finished_run(context, store_plan(context))


def test_the_last_batches_come_as_columns_of_both_timelines(http: TestClient, run_id: str) -> None:
    answer = http.get(f"/v1/runs/{run_id}/timeline/columns?batches=2").raise_for_status()
    both = parse(OverlayColumns, answer.text)
    assert both.predicted is not None
    predicted, measured = both.predicted.timeline(), both.measured.timeline()
    assert [lane.instructions for lane in predicted.lanes] == [lane.instructions for lane in measured.lanes]
    assert measured.makespan_s == pytest.approx(SLOWER * predicted.makespan_s)
    tag = answer.headers["ETag"]
    again = http.get(f"/v1/runs/{run_id}/timeline/columns?batches=2", headers={"If-None-Match": tag})
    assert again.status_code == 304
    plain = http.get(f"/v1/runs/{run_id}/timeline/columns?batches=2", headers={"Accept-Encoding": "identity"})
    assert plain.json() == answer.json()


def test_the_last_batches_are_found_before_a_checkpoint_that_took_longer_than_many(
    http: TestClient, context: Context
) -> None:
    run_id = finished_run(context, store_plan(context), steps=60, checkpoint_s=1000.0)
    answer = http.get(f"/v1/runs/{run_id}/timeline/columns?batches=2").raise_for_status()
    both = parse(OverlayColumns, answer.text)
    assert both.predicted is not None
    predicted, measured = both.predicted.timeline(), both.measured.timeline()
    assert [lane.instructions for lane in predicted.lanes] == [lane.instructions for lane in measured.lanes]
    assert measured.makespan_s == pytest.approx(SLOWER * predicted.makespan_s)


def test_the_page_says_by_stage_how_much_longer_instructions_took(http: TestClient, run_id: str) -> None:
    page = http.get(f"/runs/{run_id}").raise_for_status().text
    assert f'data-timeline="/v1/runs/{run_id}/timeline/columns?batches=3"' in page
    table = page.partition('aria-label="Difference by instruction"')[2].partition("</table>")[0]
    rows = [row for row in table.split("<tr>") if '"Instruction">Forward<' in row]
    assert rows
    assert all("+25.0 %" in row for row in rows)


def test_the_timelines_table_has_every_instruction_as_predicted_and_as_measured(http: TestClient, run_id: str) -> None:
    text = http.get(f"/v1/runs/{run_id}/charts/timeline.csv?batches=2").raise_for_status().text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["rank"] for row in rows} == {"0", "1"}
    for row in rows:
        predicted_s = float(row["predicted_end_s"]) - float(row["predicted_start_s"])
        measured_s = float(row["measured_end_s"]) - float(row["measured_start_s"])
        assert measured_s == pytest.approx(SLOWER * predicted_s)
        assert float(row["longer_s"]) == pytest.approx(measured_s - predicted_s)


def test_a_second_is_as_wide_in_both_drawings_of_the_picture(http: TestClient, run_id: str) -> None:
    text = http.get(f"/v1/runs/{run_id}/charts/timeline.svg?batches=2").raise_for_status().text
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(text)
    bars = [group.find(f"{svg}rect") for chart in root.iterfind(f"{svg}svg") for group in chart.iter(f"{svg}g")]
    widths = [float(str(bar.get("width"))) for bar in bars if bar is not None]
    predicted, measured = widths[: len(widths) // 2], widths[len(widths) // 2 :]
    for one, other in zip(predicted, measured, strict=True):
        assert other == pytest.approx(SLOWER * one, abs=0.02)


def test_losses_are_a_table_and_a_picture(http: TestClient, run_id: str) -> None:
    text = http.get(f"/v1/runs/{run_id}/charts/loss.csv").raise_for_status().text
    assert list(csv.reader(io.StringIO(text))) == [
        ["step", "loss"],
        ["0", "4.0"],
        ["1", "3.5"],
        ["2", "3.2"],
        ["3", "3.1"],
    ]
    drawn = http.get(f"/v1/runs/{run_id}/charts/loss.svg").raise_for_status().text
    assert "polyline" in drawn
    ElementTree.fromstring(drawn)


def test_a_run_that_measured_nothing_has_no_charts(http: TestClient, context: Context) -> None:
    failed = failed_run(context, store_plan(context), "out of memory")
    assert http.get(f"/runs/{failed}").status_code == 200
    assert http.get(f"/v1/runs/{failed}/timeline/columns").status_code == 404
    refused = http.get(f"/v1/runs/{failed}/charts/loss.svg")
    assert refused.status_code == 422
    assert json.loads(refused.text)["errors"][0]["field"] == "chart"
