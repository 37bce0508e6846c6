"""Charts of a plan: what they show is what the plan holds, and their files hold the same."""

import csv
import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.documents.plan import Alternative, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.simulation.predict import predict
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.plans import service as plans
from planner_service.plans.charts import BOTTOM, DEGREES, FAR, considered, front_chart, memory_chart, search_map
from planner_service.platform.context import Context
from tests.planner_service.answers import halve
from tests.planner_service.examples import store_plan

CHARTS = ("stages", "memory", "front", "search", "schedule")


def _plan() -> Plan:
    answer = halve("gpipe", PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=16))
    assert isinstance(answer, Plan)
    return answer


def _other(depth: int, size: int, rate: float | None, memory_bytes: int | None) -> Alternative:
    return Alternative(
        schedule="gpipe",
        depth=depth,
        width=1,
        microbatch_size=size,
        microbatches=4,
        recompute=False,
        throughput_samples_per_s=rate,
        memory_bytes=memory_bytes,
        reason="slower",
    )


OTHERS = st.lists(
    st.builds(
        _other,
        st.integers(1, 4),
        st.integers(1, 4),
        st.none() | st.integers(1, 90).map(float),
        st.none() | st.integers(1, 60).map(lambda mebibytes: mebibytes * 2**20),
    ),
    max_size=12,
    unique_by=lambda each: (each.depth, each.microbatch_size),
)


@given(st.integers(1, 2 * FAR))
def test_a_column_is_as_high_as_what_is_held_and_the_line_as_what_there_is(times: int) -> None:
    plan = _plan()
    capacity = times * plan.stages[0].memory_bytes
    chart = memory_chart(plan, (capacity,) * plan.depth)
    for column, stage in zip(chart.columns, plan.stages, strict=True):
        high = sum(part.height for part in column.parts)
        assert min(part.y for part in column.parts) == pytest.approx(BOTTOM - high)
        if column.capacity_y is None:
            assert times > FAR
        else:
            assert (BOTTOM - column.capacity_y) / high == pytest.approx(capacity / stage.memory_bytes)
            assert column.capacity_y >= 0


def test_columns_are_stacked_by_the_ledger_of_all_stages_of_a_rank(context: Context) -> None:
    planning = replace(context, solve=solve)
    plan = plans.get(planning, store_plan(planning, planner="auto"))
    names, *rows = memory_chart(plan, plans.capacities(context, plan)).rows
    for row, stage in zip(rows, plan.stages, strict=True):
        held = dict(zip(names, row, strict=True))
        assert stage.memory is not None
        assert held["weights_bytes"] == stage.memory.weights
        assert held["held_bytes"] == stage.memory_bytes
        assert held["capacity_bytes"] == CLUSTER.device.usable_bytes


@given(OTHERS)
def test_nothing_beats_the_front_and_whatever_is_not_on_it_is_beaten(others: list[Alternative]) -> None:
    plan = replace(_plan(), alternatives=tuple(others))
    chart = front_chart(plan)
    assert chart is not None
    names, *rows = chart.rows
    found = [dict(zip(names, row, strict=True)) for row in rows]
    points = [(int(str(row["memory_bytes"])), float(str(row["samples_per_s"])), row["on_front"]) for row in found]
    assert len(points) == len(chart.dots)
    assert len(points) + chart.unknown == len(considered(plan))
    for held, rate, on_front in points:
        as_good = [
            (less, more) for less, more, _ in points if less <= held and more >= rate and (less, more) != (held, rate)
        ]
        assert not (on_front == "true" and as_good)
        equal = [other for other in points if other[:2] == (held, rate) and other[2] == "true"]
        assert on_front == "true" or as_good or equal
    assert sum(dot.kind == "chosen" for dot in chart.dots) == 1


@given(OTHERS)
def test_every_point_of_the_front_is_labelled_and_so_is_the_answer(others: list[Alternative]) -> None:
    chart = front_chart(replace(_plan(), alternatives=tuple(others)))
    assert chart is not None
    for dot in chart.dots:
        assert bool(dot.label) == (dot.kind != "beaten")


@given(OTHERS, st.sampled_from(sorted(DEGREES)), st.sampled_from(sorted(DEGREES)))
def test_a_cell_holds_the_best_of_all_with_its_two_values(others: list[Alternative], across: str, down: str) -> None:
    plan = replace(_plan(), alternatives=tuple(others))
    if across == down:
        with pytest.raises(InvalidInputError, match="another degree"):
            search_map(plan, across, down)
        return
    chart = search_map(plan, across, down)
    every = considered(plan)
    played = chart.price == "played"
    rates: dict[tuple[object, object], list[float | None]] = {}
    for each in every:
        rate = each.throughput_samples_per_s if played else each.closed_form_samples_per_s
        rates.setdefault((DEGREES[across](each), DEGREES[down](each)), []).append(rate)
    assert {(row[0], row[1]) for row in chart.rows[1:]} == set(rates)
    for x, y, best, count, _, _ in chart.rows[1:]:
        known = [rate for rate in rates[x, y] if rate is not None]
        assert (best, count) == (max(known, default=None), len(rates[x, y]))
    assert sum(cell.chosen for cell in chart.cells) == 1


def test_charts_never_compare_a_play_with_a_closed_form() -> None:
    plan = _plan()
    unplayed = replace(_other(4, 1, None, 2**20), closed_form_samples_per_s=1e6)
    mixed = front_chart(replace(plan, alternatives=(unplayed, _other(1, 1, 20.0, 2**20))))
    closed = front_chart(replace(plan, alternatives=(unplayed,)))
    assert mixed is not None
    assert closed is not None
    assert (mixed.price, len(mixed.dots), mixed.unknown) == ("played", 2, 1)
    assert (closed.price, [row[-4] for row in closed.rows[1:]]) == ("in closed form", [80.0, 1e6])
    alone = front_chart(replace(plan, alternatives=(_other(4, 1, None, None),)))
    assert alone is not None
    assert (alone.price, len(alone.dots), alone.unknown) == ("played", 1, 1)


@pytest.mark.parametrize("chart", ["search", "stages", "memory"])
@pytest.mark.parametrize("degree", ["<b>", "", "\r\nX-Evil: 1", "\N{GRINNING FACE}"])
def test_degrees_that_there_are_not_are_named(http: TestClient, context: Context, chart: str, degree: str) -> None:
    """They are in every chart's entity tag: charts without degrees put them into the header as they came."""
    path = f"/v1/plans/{store_plan(context)}/charts/{chart}.svg"
    for field in ("across", "down"):
        answer = http.get(path, params={field: degree})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == field


def test_a_pages_degrees_that_there_are_not_are_named(http: TestClient, context: Context) -> None:
    answer = http.get(f"/plans/{store_plan(context)}", params={"across": "<b>"})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "across")


def test_a_picture_of_colours_says_what_they_stand_for(http: TestClient, context: Context) -> None:
    """The page has the legend beside the chart; the file had none."""
    plan_id = store_plan(replace(context, solve=solve), planner="auto")
    svg = "{http://www.w3.org/2000/svg}"
    for chart, known, colour in (
        ("memory", "activations", "m-activations"),
        ("schedule", "Forward", "Forward"),
    ):
        root = ElementTree.fromstring(http.get(f"/v1/plans/{plan_id}/charts/{chart}.svg").text)
        entries = dict(zip(root.findall(f"{svg}text"), root.findall(f"{svg}g"), strict=True))
        legend = {text.text: group.get("class") for text, group in entries.items()}
        assert legend[known] == colour
        drawn = root.find(f"{svg}svg")
        assert drawn is not None
        lowest = max(float(text.get("y", "0")) for text in entries)
        assert float(drawn.get("height", "0")) >= lowest + 6, "the legend is cut off"


def test_every_chart_is_a_table_and_a_picture_with_a_tag(http: TestClient, context: Context) -> None:
    planning = replace(context, solve=solve)
    plan_id = store_plan(planning, planner="auto")
    page = http.get(f"/plans/{plan_id}", headers={"Accept": "text/html"}).text
    for chart in CHARTS:
        table = http.get(f"/v1/plans/{plan_id}/charts/{chart}.csv")
        names, *rows = csv.reader(io.StringIO(table.text))
        assert rows
        assert {len(row) for row in rows} == {len(names)}
        picture = http.get(f"/v1/plans/{plan_id}/charts/{chart}.svg")
        assert picture.headers["Content-Type"].startswith("image/svg+xml")
        assert picture.headers["Content-Disposition"].endswith(f'-{chart}.svg"')
        root = ElementTree.fromstring(picture.text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not [each for each in root.iter() if each.tag.rpartition("}")[2] in ("script", "image", "foreignObject")]
        unchanged = http.get(picture.url.path, headers={"If-None-Match": picture.headers["ETag"]})
        assert unchanged.status_code == 304
        for kind in ("csv", "svg"):
            assert f"/v1/plans/{plan_id}/charts/{chart}.{kind}" in page
    assert http.get(f"/v1/plans/{plan_id}/charts/nothing.svg").status_code == 422
    assert http.get(f"/v1/plans/{plan_id}/charts/memory.pdf").status_code == 422
    assert http.get("/v1/plans/nothing/charts/memory.svg").status_code == 404


def test_the_schedules_table_is_the_prediction(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context, batch_size=4)
    table = http.get(f"/v1/plans/{plan_id}/charts/schedule.csv", params={"batches": 1}).text
    rows = list(csv.DictReader(io.StringIO(table)))
    lanes = predict(plans.get(context, plan_id), batches=1).lanes
    assert [(row["rank"], float(row["end_s"])) for row in rows] == [
        (str(lane.rank), end_s) for lane in lanes for end_s in lane.end_s
    ]
    assert rows[0]["instruction"] == "F1"
