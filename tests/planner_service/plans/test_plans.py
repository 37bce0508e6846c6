"""Plans over HTTP: stored by content, played again, or no answer but reasons."""

import gzip
import html
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.files import parse, parse_plan
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Answer, Plan
from pipeplan.errors import InvalidInputError
from pipeplan.planners.problem import PlanningProblem
from pipeplan.programs.timeline_columns import TimelineColumns
from pipeplan.programs.timeline_document import TimelineDocument
from pipeplan.simulation.predict import predict
from planner_service.overview.openapi import CLUSTER, PLAN_REQUEST, PROFILE
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.platform.listing import Cut
from tests.planner_service.answers import halve
from tests.planner_service.examples import profile_document, request_document, store_plan


@pytest.fixture
def ready(http: TestClient) -> TestClient:
    """The application with the profile and the cluster that the examples name."""
    http.post("/v1/profiles", json=profile_document())
    http.post("/v1/clusters", json=asdict(CLUSTER))
    return http


def test_a_plan_is_stored_under_its_contents_hash(ready: TestClient) -> None:
    created = ready.post("/v1/plans", json=request_document())
    assert created.status_code == 201
    answer = created.json()
    assert answer["feasible"] is True
    assert answer["solve_time_s"] >= 0
    plan = parse_plan(ready.get(created.headers["location"]).content)
    assert created.headers["location"] == f"/v1/plans/{content_id(plan)}"
    assert parse_plan(created.content) == plan


def test_the_same_request_gives_the_same_plan_once(ready: TestClient) -> None:
    first = ready.post("/v1/plans", json=request_document())
    second = ready.post("/v1/plans", json=request_document())
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]
    (listed,) = ready.get("/v1/plans").json()["items"]
    assert (listed["depth"], listed["width"], listed["workers"]) == (2, 1, 2)


def test_no_feasible_plan_is_an_answer_that_names_stage_and_bytes_and_stores_nothing(ready: TestClient) -> None:
    tight = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=20 * 2**20))
    cluster_id = ready.post("/v1/clusters", json=asdict(tight)).json()["id"]
    answer = ready.post("/v1/plans", json=request_document(cluster_id=cluster_id))
    assert answer.status_code == 200
    assert answer.json()["feasible"] is False
    assert answer.json()["reasons"][0]["stage"] == 0
    assert answer.json()["reasons"][0]["missing_bytes"] == 4 * 2**20
    assert ready.get("/v1/plans").json()["items"] == []


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"profile_id": "0" * 32}, "profile_id"),
        ({"cluster_id": "0" * 32}, "cluster_id"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 10**30}, "batch_size"),
        ({"options": {"schedule": "fastest"}}, "options.schedule"),
        ({"options": {"speed": 1}}, "options.speed"),
        ({"options": {"recompute_factor": 0.5}}, "recompute_factor"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_request_is_refused_and_stores_nothing(ready: TestClient, changes: dict[str, Any], field: str) -> None:
    answer = ready.post("/v1/plans", json=request_document(**changes))
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert ready.get("/v1/plans").json()["items"] == []


def test_a_prediction_that_is_no_finite_number_is_refused_and_stores_nothing(context: Context) -> None:
    """Found by sending times of 5e-324 s: the throughput was infinite, which JSON does not have."""
    store_plan(context, batch_size=2)

    def boundless(planner: str, problem: PlanningProblem) -> Answer:
        plan = _halved(planner, problem)
        return replace(plan, closed_form=replace(plan.closed_form, throughput_samples_per_s=float("inf")))

    with pytest.raises(InvalidInputError, match=r"profile_id: .*finite"):
        plans.create(replace(context, solve=boundless), PLAN_REQUEST)
    assert len(plans.newest(context, Cut()).items) == 1


def test_counts_beyond_what_a_column_holds_are_refused(context: Context) -> None:
    store_plan(context, batch_size=2)

    def huge(planner: str, problem: PlanningProblem) -> Answer:
        return replace(_halved(planner, problem), batch_size=2**63)

    with pytest.raises(InvalidInputError):
        plans.create(replace(context, solve=huge), PLAN_REQUEST)


def _halved(planner: str, problem: PlanningProblem) -> Plan:
    answer = halve(planner, problem)
    if not isinstance(answer, Plan):
        raise LookupError("no plan fits")
    return answer


def test_the_streams_are_those_that_the_schedule_generates(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context, batch_size=4)
    streams = http.get(f"/v1/plans/{plan_id}/streams").json()["streams"]
    assert [stream["text"] for stream in streams] == [
        "F1 >F1:1 F2 >F2:1 <B1:1 B1 <B2:1 B2 U1",
        "<F1:0 F1 B1 >B1:0 <F2:0 F2 B2 >B2:0 U1",
    ]


def test_the_timeline_is_the_prediction(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    plan = parse_plan(http.get(f"/v1/plans/{plan_id}").content)
    timeline = parse(TimelineDocument, http.get(f"/v1/plans/{plan_id}/timeline", params={"batches": 3}).content)
    assert timeline.timeline() == predict(plan, batches=3)


def test_the_columns_are_the_prediction_compressed_for_whoever_takes_gzip(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    path = f"/v1/plans/{plan_id}/timeline/columns?batches=3"
    packed = http.get(path, headers={"Accept-Encoding": "br, gzip"})
    assert packed.headers["Content-Encoding"] == "gzip"
    plain = http.get(path, headers={"Accept-Encoding": "gzip;q=0"})
    assert "Content-Encoding" not in plain.headers
    assert packed.content == plain.content
    assert packed.headers["Vary"] == plain.headers["Vary"] == "Accept-Encoding"
    assert packed.headers["ETag"] != plain.headers["ETag"]
    again = http.get(path, headers={"Accept-Encoding": "gzip", "If-None-Match": packed.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")

    played = predict(plans.get(context, plan_id), batches=3)
    timeline = parse(TimelineColumns, packed.content).timeline()
    assert [lane.instructions for lane in timeline.lanes] == [lane.instructions for lane in played.lanes]
    assert timeline.makespan_s == pytest.approx(played.makespan_s)


def test_a_timeline_that_was_played_is_sent_from_the_cache(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    path = f"/v1/plans/{plan_id}/timeline/columns"
    first = http.get(path).content
    kept = context.documents.get("timelines", f"{plan_id}.2")
    assert kept is not None
    assert gzip.decompress(kept) == first
    context.documents.put("timelines", f"{plan_id}.2", gzip.compress(b"{}"))
    assert http.get(path).json() == {}


def test_more_batches_than_can_be_played_are_refused(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context, batch_size=100_000)
    answer = http.get(f"/v1/plans/{plan_id}/timeline", params={"batches": 1000})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "batches"


def test_a_plan_that_does_not_exist_is_a_404(http: TestClient) -> None:
    for path in ("", "/streams", "/timeline", "/timeline/columns", "/trace"):
        assert http.get(f"/v1/plans/nothing{path}").status_code == 404


def store_mixed_plan(http: TestClient) -> tuple[str, str]:
    """Stores a plan for one device of each of two types; returns its id and its cluster's."""
    devices = [asdict(PROFILE.device) | {"name": name} for name in ("one, really", '"other" ünlike')]
    profiles = [profile_document(device=device) for device in devices]
    groups = [{"device": device, "count": 1} for device in devices]
    cluster = {"groups": groups, "levels": [{"size": 2, "bandwidth_bytes_per_s": 1e9}]}
    first, second = (http.post("/v1/profiles", json=each).json()["id"] for each in profiles)
    asked = request_document(profile_id=first, other_profile_ids=[second], planner="exact")
    asked["cluster_id"] = http.post("/v1/clusters", json=cluster).json()["id"]
    answer = http.post("/v1/plans", json=asked)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"], asked["cluster_id"]


def test_the_tests_planner_is_deterministic(context: Context) -> None:
    assert store_plan(context) == store_plan(context)
    assert context.solve is halve
    assert PROFILE.microbatch_sizes == (1, 2)


def test_every_type_of_a_mixed_cluster_is_listed_and_finds_its_plans(http: TestClient) -> None:
    """Lists and filters knew the first type only, as if all devices were of it."""
    plan_id, cluster_id = store_mixed_plan(http)
    named = '1 x one, really + 1 x "other" ünlike'
    for path, wanted in (("/v1/plans", plan_id), ("/v1/clusters", cluster_id)):
        (summary,) = http.get(path).json()["items"]
        assert (summary["device_types"], summary["device"], summary["devices"]) == (named, "one, really", 2)
        for device in ("one, really", '"other" ünlike'):
            assert [each["id"] for each in http.get(path, params={"device": device}).json()["items"]] == [wanted]
        for device in ("one", "ONE, REALLY", "1", "other", '%"other%', "really"):
            assert http.get(path, params={"device": device}).json()["items"] == [], device
    for address in ("/", "/plans", f"/plans/{plan_id}", "/clusters", "/plans/new"):
        page = http.get(address, headers={"Accept": "text/html"}).text
        assert named in html.unescape(re.sub(r"<[^>]+>", "", page)), address
    found = http.get("/plans", params={"device": '"other" ünlike'}, headers={"Accept": "text/html"}).text
    assert f"/plans/{plan_id}" in found
