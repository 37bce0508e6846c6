"""Calibrations of the service: what its runs correct, on a page, over HTTP, and in the next plan."""

import html
import re

import pytest
from fastapi.testclient import TestClient

from pipeplan.calibration.calibrate import calibrate
from pipeplan.calibration.samples import MeasuredRun
from pipeplan.documents.calibration import Calibration
from pipeplan.documents.files import parse
from pipeplan.planners.problem import Options
from planner_service.app import create_app
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.platform.settings import Settings
from planner_service.runs import service as runs
from tests.planner_service.dashboard_content import failed_run, finished_run, named_plan
from tests.planner_service.examples import store_plan

OWN = {"Origin": "http://127.0.0.1"}


@pytest.fixture
def run_id(context: Context) -> str:
    """A run that took a quarter longer than predicted."""
    return finished_run(context, store_plan(context))


def test_the_services_calibration_is_the_librarys_of_the_same_runs(
    http: TestClient, context: Context, run_id: str
) -> None:
    other = finished_run(context, store_plan(context, batch_size=32))
    measured = [
        MeasuredRun(
            plan=plans.get(context, runs.get(context, each).plan_id),
            timeline=runs.timelines(context, each)["measured"],
            peak_resident_bytes=(2**30, 2**30),
        )
        for each in (run_id, other)
    ]
    answer = http.get("/v1/runs/calibration", params={"id": [run_id, other]}).raise_for_status()
    assert parse(Calibration, answer.text) == calibrate(PROFILE, CLUSTER, measured)


def test_the_page_shows_terms_and_errors_and_offers_runs_of_the_same_profile(
    http: TestClient, context: Context, run_id: str
) -> None:
    other = finished_run(context, store_plan(context, batch_size=32))
    elsewhere = finished_run(context, named_plan(context, "another"))
    page = http.get(f"/runs/calibrate?run={run_id}").raise_for_status().text
    assert '<td data-label="Term">Forward, by block</td>' in page
    assert f'name="run" value="{other}"' in page
    assert elsewhere not in page
    both = http.get(f"/runs/calibrate?run={run_id}&run={other}").raise_for_status().text
    assert f'name="run" value="{other}" checked' in both
    assert f'href="/runs/calibrate?run={run_id}"' in http.get(f"/runs/{run_id}").text


def test_a_run_of_several_stages_a_rank_is_calibrated_from_its_page(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        services: Context = app.state.context
        chosen = Options(schedule="1f1b-interleaved", stages=2, chunks=2)
        plan_id = store_plan(services, planner="auto", options=chosen)
        assert plans.get(services, plan_id).chunks == 2
        run_id = finished_run(services, plan_id)
        assert f'href="/runs/calibrate?run={run_id}"' in client.get(f"/runs/{run_id}").raise_for_status().text
        answer = client.get("/v1/runs/calibration", params={"id": run_id}).raise_for_status()
    found = parse(Calibration, answer.text)
    assert found.forward is not None and found.backward is not None
    assert found.forward.values == pytest.approx([1.25] * len(PROFILE.blocks), rel=0.01)
    assert found.backward.values == pytest.approx([1.25] * len(PROFILE.blocks), rel=0.01)


def test_a_press_makes_the_plan_again_with_the_corrected_costs(database_url: str) -> None:
    app = create_app(Settings(database_url=database_url))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        services: Context = app.state.context
        plain_id = store_plan(services)
        run_id = finished_run(services, plain_id)
        made = client.post("/runs/calibrate", data={"runs": run_id}, headers=OWN, follow_redirects=False)
        assert made.status_code == 303
        plan_id = made.headers["location"].removeprefix("/plans/")
        found = parse(Calibration, client.get("/v1/runs/calibration", params={"id": run_id}).text)
        assert plans.request(services, plan_id).calibration == found
        plain, corrected = plans.get(services, plain_id), plans.get(services, plan_id)
    assert corrected.batch_size == plain.batch_size
    assert corrected.throughput_samples_per_s is not None and plain.throughput_samples_per_s is not None
    assert plain.throughput_samples_per_s / corrected.throughput_samples_per_s == pytest.approx(1.25, rel=0.01)


def test_the_command_of_the_page_asks_for_that_calibration(http: TestClient, run_id: str) -> None:
    page = http.get(f"/runs/calibrate?run={run_id}").text
    (command,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)
    (address,) = re.findall(r"'http://127.0.0.1(/.*?)'", html.unescape(command))
    assert http.get(address).raise_for_status().json()["model"]["name"] == PROFILE.model.name


@pytest.mark.parametrize("page", ["/runs/calibrate?run={}", "/v1/runs/calibration?id={}"])
def test_runs_that_cannot_be_used_are_named(http: TestClient, context: Context, run_id: str, page: str) -> None:
    failed = failed_run(context, store_plan(context), "out of memory")
    answer = http.get(page.format(failed))
    assert answer.status_code == 422
    assert "must be a run that has succeeded" in html.unescape(answer.text)
    name = page.partition("?")[2].partition("=")[0]
    mixed = http.get(page.format(run_id) + f"&{name}={finished_run(context, named_plan(context, 'another'))}")
    assert mixed.status_code == 422
    assert "must be that of run" in html.unescape(mixed.text)
    assert http.get(page.format("0" * 32)).status_code == 404
