"""Lists: filters, orders and cursors, on all nouns that have them; and pages that never look at more than so many."""

import base64
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from pipeplan.documents.plan import Answer, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import PlanningProblem
from pipeplan.protocol.plans import PlanQuery
from planner_service.plans import service as plans
from planner_service.plans import store as stored_plans
from planner_service.platform import listing
from planner_service.platform.context import Context
from planner_service.platform.migrations import downgrade, upgrade
from tests.planner_service.answers import halve
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import profile_document, store_plan


@pytest.fixture
def stored(context: Context, clock: Clock) -> list[str]:
    """Six plans' ids, oldest first, a minute apart, of two planners and batches of 4 to 24 samples."""
    ids = []
    for index in range(6):
        planner = ("pipedream-2bw", "gpipe")[index % 2]
        ids.append(store_plan(context, batch_size=4 * (index + 1), planner=planner))
        clock.advance(60)
    return ids


def _ids(http: TestClient, **parameters: Any) -> list[str]:
    """All pages' ids."""
    found: list[str] = []
    cursor = None
    while True:
        page = http.get("/v1/plans", params=parameters | ({"cursor": cursor} if cursor else {}))
        assert page.status_code == 200, page.text
        found += [item["id"] for item in page.json()["items"]]
        cursor = page.json()["next_cursor"]
        if cursor is None:
            return found


def _refused(http: TestClient, path: str = "/v1/plans", **parameters: Any) -> dict[str, Any]:
    answer = http.get(path, params=parameters)
    assert answer.status_code == 422, answer.text
    (rule,) = answer.json()["errors"]
    assert set(rule) == {"field", "rule", "value"}
    return dict(rule)


@pytest.mark.each_case
@pytest.mark.parametrize("limit", [1, 4, 200])
def test_every_order_is_kept_over_pages_and_turned_round_by_a_minus(
    http: TestClient, stored: list[str], limit: int
) -> None:
    assert _ids(http, limit=limit) == stored[::-1]
    assert _ids(http, limit=limit, sort="created_at") == stored
    for sort in ("throughput", "memory"):  # all the same here: what came in first is first
        assert _ids(http, limit=limit, sort=sort) == stored
        assert _ids(http, limit=limit, sort=f"-{sort}") == stored[::-1]


PRICES = (40.0, None, 20.0, None, 60.0, 20.0)
"""The played throughputs of six plans, by place; the closed form's are another order: 10, 20, ..., 60."""


def priced(planner: str, problem: PlanningProblem) -> Answer:
    """The halves with the price of their place, which the batch size says."""
    plan = halve(planner, problem)
    assert isinstance(plan, Plan) and plan.simulated is not None
    place = problem.batch_size // 4 - 1
    form, price = replace(plan.closed_form, throughput_samples_per_s=10.0 * (place + 1)), PRICES[place]
    simulated = None if price is None else replace(plan.simulated, throughput_samples_per_s=price)
    return replace(plan, closed_form=form, simulated=simulated)


@pytest.fixture
def prices(context: Context, clock: Clock) -> list[str]:
    """Six plans' ids, oldest first, with the prices of `PRICES`."""
    ids = []
    for place in range(len(PRICES)):
        planner = ("pipedream-2bw", "gpipe")[place % 2]
        ids.append(store_plan(replace(context, solve=priced), batch_size=4 * (place + 1), planner=planner))
        clock.advance(60)
    return ids


@pytest.mark.each_case
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 200])
@pytest.mark.parametrize(
    ("parameters", "places"),
    [
        ({"sort": "throughput"}, [2, 5, 0, 4, 1, 3]),
        ({"sort": "-throughput"}, [4, 0, 5, 2, 3, 1]),
        ({"sort": "-throughput", "planner": "gpipe"}, [5, 3, 1]),
        ({"sort": "throughput", "planner": "gpipe"}, [5, 1, 3]),
        ({"sort": "throughput", "devices": 2}, [2, 5, 0, 4, 1, 3]),
        ({"sort": "-throughput", "devices": 2, "estimated": "false"}, [4, 0, 5, 2, 3, 1]),
        ({"sort": "throughput", "min_throughput": 30}, [0, 4]),
        ({"sort": "-throughput", "min_throughput": 30, "devices": 2}, [4, 0]),
        ({"min_throughput": 15}, [5, 4, 2, 0]),
        ({"min_throughput": 0}, [5, 4, 2, 0]),
        ({"sort": "memory"}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_plans_go_by_the_played_price_and_those_without_one_come_last_both_ways(
    http: TestClient, prices: list[str], parameters: dict[str, Any], places: list[int], limit: int
) -> None:
    assert _ids(http, limit=limit, **parameters) == [prices[place] for place in places]


@pytest.mark.each_case
@pytest.mark.parametrize("sort", ["throughput", "-throughput"])
def test_plans_without_a_price_are_looked_for_a_few_rows_at_a_time_too(
    http: TestClient, prices: list[str], sort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _ids(http, sort=sort, devices=2)
    monkeypatch.setattr(listing, "MAX_SCANNED", 2)
    assert _ids(http, sort=sort, devices=2, limit=3) == expected
    assert _ids(http, sort=sort, devices=3) == []


def test_a_summary_has_both_figures_and_no_price_where_nothing_was_played(http: TestClient, prices: list[str]) -> None:
    items = http.get("/v1/plans", params={"sort": "created_at"}).json()["items"]
    assert [item["throughput_samples_per_s"] for item in items] == list(PRICES)
    assert [item["bubble_fraction"] for item in items] == [None if price is None else 0.1 for price in PRICES]
    assert [item["closed_form_samples_per_s"] for item in items] == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert {item["closed_form_bubble_fraction"] for item in items} == {0.05}


def test_the_pages_of_lists_name_both_figures(http: TestClient, prices: list[str]) -> None:
    page = http.get("/plans", params={"sort": "-throughput"}).text
    assert "Throughput ↓</a>" in page
    assert page.count("<small>closed form ") == len(PRICES)
    assert page.count("closed form only") == PRICES.count(None)
    order = [page.index(f'href="/plans/{prices[place]}"') for place in (4, 0, 5, 2, 3, 1)]
    assert order == sorted(order)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("parameters", "places"),
    [
        ({"planner": "gpipe"}, [5, 3, 1]),
        ({"planner": "none"}, []),
        ({"schedule": "1f1b", "planner": "gpipe"}, [5, 3, 1]),
        ({"model": "gpt2-small-4", "limit": 2}, [5, 4, 3, 2, 1, 0]),
        ({"device": "A100-40GB", "devices": 2, "estimated": "false"}, [5, 4, 3, 2, 1, 0]),
        ({"devices": 4}, []),
        ({"estimated": "true"}, []),
        ({"min_throughput": 60}, [5, 4, 3, 2, 1, 0]),
        ({"min_throughput": 60.5}, []),
        ({"created_after": "2026-01-02T03:06:05Z", "created_before": "2026-01-02T03:08:05Z"}, [3, 2]),
        ({"created_after": "2026-01-02T04:08:05+01:00", "planner": "pipedream-2bw"}, [4]),
        ({"planner": "gpipe", "min_throughput": 1, "sort": "-throughput", "limit": 1}, [5, 3, 1]),
    ],
)
def test_filters_leave_what_passes_all_of_them(
    http: TestClient, stored: list[str], parameters: dict[str, Any], places: list[int]
) -> None:
    assert _ids(http, **parameters) == [stored[place] for place in places]


def test_plans_are_filtered_by_what_they_were_made_from(http: TestClient, stored: list[str]) -> None:
    summary = http.get("/v1/plans", params={"limit": 1}).json()["items"][0]
    for name in ("profile_id", "cluster_id"):
        assert _ids(http, **{name: summary[name]}) == stored[::-1]
        assert _ids(http, **{name: "0" * 32}) == []
    assert (summary["device"], summary["devices"], summary["memory_bytes"]) == ("A100-40GB", 2, 24 * 2**20)


def test_whole_plans_are_listed_as_they_are_sent_one_by_one(http: TestClient, stored: list[str]) -> None:
    for _ in range(2):  # read, then from the cache
        page = http.get("/v1/plans", params={"content": "true", "limit": 2, "planner": "gpipe"}).json()
        assert [item["id"] for item in page["items"]] == [stored[5], stored[3]]
        assert page["items"][0] == http.get(f"/v1/plans/{stored[5]}").json()
    rest = http.get("/v1/plans", params={"content": "true", "planner": "gpipe", "cursor": page["next_cursor"]}).json()
    assert [item["id"] for item in rest["items"]] == [stored[1]]


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"Planner": "gpipe"}, "Planner"),
        ({"sort": "speed"}, "sort"),
        ({"sort": ["throughput", "memory"]}, "sort"),
        ({"planner": ""}, "planner"),
        ({"planner": "a\0b"}, "planner"),
        ({"devices": "two"}, "devices"),
        ({"devices": 0}, "devices"),
        ({"min_throughput": "nan"}, "min_throughput"),
        ({"min_throughput": "-1"}, "min_throughput"),
        ({"estimated": "perhaps"}, "estimated"),
        ({"created_after": "yesterday"}, "created_after"),
        ({"created_after": "2026-01-02T03:04:05"}, "created_after"),
        ({"created_before": "0001-01-01T00:00:00+10:00"}, "created_before"),
        ({"limit": 0}, "limit"),
        ({"cursor": "x" * 3000}, "cursor"),
    ],
)
def test_what_is_not_known_is_refused_by_name(http: TestClient, parameters: dict[str, Any], field: str) -> None:
    assert _refused(http, **parameters)["field"] == field


@pytest.mark.each_case
@pytest.mark.parametrize("path", ["/v1/profiles", "/v1/clusters", "/v1/jobs", "/v1/runs", "/v1/aliases", "/healthz"])
def test_every_route_refuses_parameters_that_it_does_not_have(http: TestClient, path: str) -> None:
    assert _refused(http, path, surprise="1")["field"] == "surprise"


def test_a_cursor_goes_on_in_its_own_list_only(http: TestClient, stored: list[str]) -> None:
    cursor = http.get("/v1/plans", params={"limit": 1, "sort": "-throughput", "planner": "gpipe"}).json()["next_cursor"]
    follow = http.get("/v1/plans", params={"cursor": cursor, "planner": "gpipe"}).json()
    assert [item["id"] for item in follow["items"]] == [stored[3], stored[1]]
    for other in ({"sort": "throughput", "planner": "gpipe"}, {}, {"planner": "pipedream"}, {"schedule": "gpipe"}):
        assert _refused(http, cursor=cursor, **other)["field"] == "cursor"
    assert _refused(http, "/v1/profiles", cursor=cursor)["field"] == "cursor"


@pytest.mark.each_case
@pytest.mark.parametrize(
    "content",
    [
        ["-created_at", "2026", 1, ""],
        ["-created_at", "0001-01-01T00:00:00+10:00", 1, ""],
        ["-created_at", 7, 1, ""],
        ["-throughput", "NaN", 1, ""],
        ["-throughput", [], 1, ""],
        ["-throughput", 1.0, -1, ""],
        ["-throughput", 1.0, True, ""],
        ["-throughput", 1.0, 2**63, ""],
        ["-memory", 2**70, 1, ""],
        ["-memory", None, 1, ""],
        ["-created_at", None, 1, ""],
        ["id", "0", 1, ""],
        [None, 1.0, 1, ""],
        {},
        [[[[]]]],
    ],
)
def test_a_cursor_that_was_made_by_hand_is_refused(http: TestClient, content: Any) -> None:
    cursor = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    assert _refused(http, cursor=cursor)["field"] == "cursor"


@pytest.mark.each_case
def test_a_page_looks_at_so_many_rows_and_its_cursor_goes_on_behind_them(
    http: TestClient, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MAX_SCANNED", 2)
    first = http.get("/v1/plans", params={"devices": 2, "min_throughput": 1, "limit": 3}).json()
    assert ([item["id"] for item in first["items"]], first["next_cursor"] is None) == (stored[:3:-1], False)
    none = http.get("/v1/plans", params={"devices": 3}).json()
    assert (none["items"], none["next_cursor"] is None) == ([], False)
    assert _ids(http, devices=2, min_throughput=1, limit=3) == stored[::-1]
    assert _ids(http, devices=3) == []


def _explained(context: Context, query: PlanQuery) -> list[str]:
    """How SQLite goes about the page; on PostgreSQL so small a table is read whole, whatever the indexes."""
    if not context.database.is_sqlite:
        pytest.skip("SQLite's plan of the query is looked at")
    explained: list[str] = []

    def explain(_connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT"):
            rows = cursor.connection.execute("EXPLAIN QUERY PLAN " + statement, parameters).fetchall()
            explained.extend(row[3] for row in rows)

    event.listen(context.database.engine, "before_cursor_execute", explain)
    plans.page(context, query)
    event.remove(context.database.engine, "before_cursor_execute", explain)
    return explained


@pytest.mark.each_case
@pytest.mark.parametrize(
    "query",
    [
        PlanQuery(),
        PlanQuery(sort="-throughput"),
        PlanQuery(sort="throughput"),
        PlanQuery(sort="memory"),
        PlanQuery(sort="-throughput", planner="gpipe"),
        PlanQuery(sort="-throughput", min_throughput=1.0),
        PlanQuery(schedule="1f1b", estimated=False),
    ],
)
def test_pages_are_read_off_an_index_without_sorting(context: Context, stored: list[str], query: PlanQuery) -> None:
    limit_one = query.model_copy(update={"limit": 1})
    cursor = plans.page(context, limit_one).next_cursor
    explained = _explained(context, limit_one.model_copy(update={"cursor": cursor}))
    searched = [step for step in explained if step.startswith("SEARCH plans")]
    assert any("INDEX ix_plans" in step for step in searched), explained
    assert not any(step.startswith("SCAN plans") and "INDEX" not in step for step in explained), explained


@pytest.mark.each_case
@pytest.mark.parametrize("sort", ["throughput", "-throughput"])
@pytest.mark.parametrize("planner", [None, "gpipe"])
def test_plans_without_a_price_are_read_off_an_index_too(
    context: Context, prices: list[str], sort: Literal["throughput", "-throughput"], planner: str | None
) -> None:
    """Of a page that begins after the first plan without a price nothing is sorted, in either direction."""
    query = PlanQuery(sort=sort, planner=planner, limit=2 if planner else 5)
    after_first = query.model_copy(update={"cursor": plans.page(context, query).next_cursor})
    (last,) = plans.page(context, after_first).items
    assert last.throughput_samples_per_s is None
    explained = _explained(context, after_first)
    assert all(step.startswith("SEARCH plans") and "INDEX ix_plans" in step for step in explained), explained


def test_what_lists_go_by_is_filled_in_for_plans_of_before(http: TestClient, context: Context) -> None:
    store_plan(context)
    before = http.get("/v1/plans").json()
    downgrade(context.database, "0002")
    upgrade(context.database)
    assert http.get("/v1/plans").json() == before


def test_profiles_are_listed_by_what_they_are(http: TestClient, clock: Clock) -> None:
    documents = [
        profile_document(model={"name": "a"}),
        profile_document(model={"name": "b"}, blocks=profile_document()["blocks"][:2]),
    ]
    for document in documents:
        http.post("/v1/profiles", json=document)
        clock.advance(timedelta(days=1).total_seconds())

    def models(**parameters: Any) -> list[str]:
        return [item["model"] for item in http.get("/v1/profiles", params=parameters).json()["items"]]

    assert models() == ["b", "a"]
    assert models(sort="-blocks") == ["a", "b"]
    assert models(model="a", dtype="float32") == ["a"]
    assert models(created_after="2026-01-03T00:00:00Z") == ["b"]
    assert models(estimated="true") == []


def test_an_order_that_a_list_does_not_have_is_refused_below_http_too(context: Context) -> None:
    rule = "sort: must be one of created_at, -created_at"
    with context.database.read() as connection, pytest.raises(InvalidInputError, match=rule):
        listing.page(connection, stored_plans._SUMMARIES, listing.Cut(sort="speed"))
