"""The dashboard's pages: what they show, what they show when there is nothing, and that names cannot break out."""

import re
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from pipeplan import formats
from pipeplan.documents.identity import content_id
from pipeplan.documents.profile import Model
from pipeplan.planners.solve import solve
from pipeplan.protocol.jobs import Completion, Failure, Heartbeat, LeaseRequest, Progress, Release
from pipeplan.protocol.plans import PlanRequest
from pipeplan.simulation.predict import predict
from planner_service.documents.service import clusters, profiles
from planner_service.jobs import service as jobs
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.plans import service as plans
from planner_service.plans.drawings import LABEL_WIDTH, WIDTH, draw, last_batches
from planner_service.platform.axes import round_values
from planner_service.platform.context import Context
from tests.planner_service.answers import halve_unplayed
from tests.planner_service.examples import ANY_WORK, PROFILE_TASK, request_document, run_result, run_task, store_plan

HTML = {"Accept": "text/html,application/xhtml+xml"}
EVIL = "<script>alert(1)</script>"


def _page(http: TestClient, path: str, status: int = 200) -> str:
    answer = http.get(path, headers=HTML)
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    return answer.text


def _run(context: Context, *, finish: bool = True) -> str:
    plan_id = store_plan(context)
    job = jobs.enqueue(context, run_task(plan_id))
    lease = jobs.lease(context, ANY_WORK)
    if finish and lease is not None:
        result = run_result(plans.get(context, plan_id))
        jobs.complete(context, job.id, Completion(token=lease.token, result=result))
    return str(job.run_id)


def test_the_empty_dashboard_says_what_to_do(http: TestClient) -> None:
    page = _page(http, "/")
    assert "No plans yet." in page
    assert "pipeplan plan create" in page
    assert "No runs yet." in page
    assert "http://127.0.0.1/v1/jobs" in page


def test_the_first_page_lists_plans_runs_and_jobs_in_progress(http: TestClient, context: Context) -> None:
    run_id = _run(context)
    jobs.enqueue(context, PROFILE_TASK)
    page = _page(http, "/")
    assert f"/runs/{run_id}" in page
    assert "60 samples/s" in page
    assert "48 samples/s" in page
    assert "Jobs in progress" in page


def test_a_plans_page_shows_stages_prediction_schedule_and_alternatives(http: TestClient, context: Context) -> None:
    page = _page(http, f"/plans/{store_plan(context)}")
    for text in ("60 samples/s", "24 MiB", "30 ms", "slower: 50 samples/s", "<svg", "F1 &gt;F1:1", "Not run yet"):
        assert text in page


def test_a_plans_page_names_its_price_and_the_closed_forms(http: TestClient, context: Context) -> None:
    page = _page(http, f"/plans/{store_plan(context)}")
    for fact in (
        "<dt>Throughput</dt><dd>60 samples/s<small>played over 4 batches</small>",
        "<dt>Throughput in closed form</dt><dd>80 samples/s<small>test</small>",
        "<dt>Bubble</dt><dd>10.0 %<small>in closed form 5.0 %</small>",
        "<dt>Time a microbatch</dt><dd>33.3 ms<small>in closed form 25 ms</small>",
        "50 samples/s in closed form",
    ):
        assert fact in page


def test_the_page_of_a_plan_that_was_not_played_shows_no_price(http: TestClient, context: Context) -> None:
    page = _page(http, f"/plans/{store_plan(replace(context, solve=halve_unplayed))}")
    for fact in (
        "<dt>Throughput</dt><dd>closed form only<small>the streams are too long to be played</small>",
        "<dt>Throughput in closed form</dt><dd>80 samples/s<small>test</small>",
        "<dt>Bubble</dt><dd>–<small>in closed form 5.0 %</small>",
    ):
        assert fact in page


def test_a_runs_page_shows_predicted_and_measured_side_by_side(http: TestClient, context: Context) -> None:
    page = _page(http, f"/runs/{_run(context)}")
    for text in (
        "48 samples/s",
        "-20.0 %",
        "+25.0 %",
        "Predicted over measured",
        "Difference by instruction",
        "polyline",
        "3.1",
    ):
        assert text in page
    assert "The run was 20.0 % slower than predicted: 48 samples/s, not 60. By cause, in samples/s: compute -" in page
    assert 'href="/runs/calibrate?run=' in page


def test_a_run_under_way_and_one_that_failed_say_so(http: TestClient, context: Context) -> None:
    under_way = _run(context, finish=False)
    assert "Under way." in _page(http, f"/runs/{under_way}")
    job = jobs.enqueue(context, run_task(store_plan(context)))
    assert "No agent has taken this run yet" in _page(http, f"/runs/{job.run_id}")
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    jobs.fail(context, job.id, Failure(token=lease.token, error=f"rank 1 ended {EVIL}"))
    page = _page(http, f"/runs/{job.run_id}")
    assert "rank 1 ended &lt;script&gt;" in page


def test_names_are_shown_and_never_run(http: TestClient, context: Context) -> None:
    profile = replace(PROFILE, model=Model(name=EVIL))
    profiles.create(context, profile)
    clusters.create(context, CLUSTER)
    request = PlanRequest.model_validate(request_document(profile_id=content_id(profile)))
    plan_id = str(plans.create(context, request).plan_id)
    job = jobs.enqueue(context, run_task(plan_id, model=EVIL))
    for path in ("/", f"/plans/{plan_id}", f"/runs/{job.run_id}"):
        page = _page(http, path)
        assert EVIL not in page
        assert "&lt;script&gt;" in page


def test_a_plan_of_auto_shows_its_front_its_memory_and_what_is_proven(http: TestClient, context: Context) -> None:
    planning = replace(context, solve=solve)
    plan = plans.get(planning, store_plan(planning, planner="auto"))
    assert len(plan.pareto) > 1
    page = _page(http, f"/plans/{content_id(plan)}")
    assert page.count("<circle") - page.count('class="dot beaten"') == len(plan.pareto)
    assert page.count('class="dot chosen"') == 1
    assert "Memory a worker, by item" in page
    for stage in plan.stages:
        assert stage.memory is not None
        assert formats.size(stage.memory.weights) in page
    options = {"microbatch_size": 1, "semantics": "paper"}
    certified = plans.get(planning, store_plan(planning, planner="pipedream", options=options))
    assert "proven optimal to 1e-06: slowest stage" in _page(http, f"/plans/{content_id(certified)}")


def test_what_does_not_exist_is_a_page_for_people_and_a_problem_for_programs(http: TestClient) -> None:
    assert "there is no plan nothing" in _page(http, "/plans/nothing", 404)
    assert http.get("/plans/nothing").headers["content-type"] == "application/problem+json"


def test_the_style_sheet_and_nothing_foreign_is_loaded(http: TestClient, context: Context) -> None:
    page = _page(http, f"/plans/{store_plan(context)}")
    assert http.get("/static/pipeplan.css").status_code == 200
    assert "https://" not in page
    assert re.findall(r'<script[^>]* src="([^"]*)"', page) == ["/static/live.js", "/static/timeline.js"]
    assert page.count("<script") == 2
    assert 'style="' not in page


def test_the_drawing_has_a_row_a_rank_and_bars_in_proportion(context: Context) -> None:
    plan = plans.get(context, store_plan(context, batch_size=4))
    timeline = predict(plan, batches=1)
    drawing = draw(timeline, last_batches(timeline, 1), title="Predicted")
    first, second = drawing.rows
    scale = (WIDTH - LABEL_WIDTH) / timeline.makespan_s
    assert [(bar.kind, bar.text) for bar in second.bars] == [
        ("Receive", ""),
        ("Forward", "1"),
        ("Backward", "1"),
        ("Forward", "2"),
        ("Backward", "2"),
    ]
    assert first.bars[0].x == LABEL_WIDTH
    assert first.bars[0].width == pytest.approx(0.01 * scale)
    assert second.bars[-1].width == pytest.approx(0.02 * scale)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (formats.seconds(1.25), "1.25 s"),
        (formats.seconds(0.0125), "12.5 ms"),
        (formats.seconds(8e-5), "80 µs"),
        (formats.seconds(0), "0 s"),
        (formats.size(1.5 * 2**30), "1.5 GiB"),
        (formats.size(100), "100 B"),
        (formats.rate(1234.5), "1,234 samples/s"),
        (formats.rate(None), "–"),
        (formats.percent(0.1254), "12.5 %"),
        (formats.change(-0.2), "-20.0 %"),
    ],
)
def test_quantities_are_shown_with_their_units(shown: str, text: str) -> None:
    assert shown == text


def test_axes_have_round_values() -> None:
    assert round_values(0.0, 0.95, 5) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert round_values(3.0, 3.0, 5) == [3.0]


def test_what_waits_again_shows_no_progress(http: TestClient, context: Context) -> None:
    job = jobs.enqueue(context, PROFILE_TASK)
    lease = jobs.lease(context, LeaseRequest(agent="node-1"))
    assert lease is not None
    jobs.heartbeat(context, job.id, Heartbeat(token=lease.token, progress=Progress(done=3, total=10)))
    assert all("3 of 10" in _page(http, address) for address in ("/", "/jobs", f"/jobs/{job.id}"))
    jobs.release(context, job.id, Release(token=lease.token))
    assert jobs.get(context, job.id).state == "queued"
    assert not any("3 of 10" in _page(http, address) for address in ("/", "/jobs", f"/jobs/{job.id}"))


def test_the_table_of_many_stages_is_folded(http: TestClient, context: Context) -> None:
    block, stages = PROFILE.blocks[0], 18
    profile = replace(PROFILE, blocks=tuple(replace(block, name=f"block{index}") for index in range(stages)))
    cluster = replace(CLUSTER, levels=(replace(CLUSTER.levels[0], size=stages),))
    profiles.create(context, profile)
    clusters.create(context, cluster)
    asked = request_document(
        profile_id=content_id(profile), cluster_id=content_id(cluster), options={"schedule": "1f1b", "stages": stages}
    )
    deep = plans.create(replace(context, solve=solve), PlanRequest.model_validate(asked)).plan_id
    assert "The 18 stages as a table</summary>" in _page(http, f"/plans/{deep}")
    assert "stages as a table</summary>" not in _page(http, f"/plans/{store_plan(context)}")
