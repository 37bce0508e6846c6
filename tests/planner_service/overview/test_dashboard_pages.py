"""The dashboard's pages one by one: lists by filter, sort and page; plans side by side; buttons and who sees them."""

import re
from collections.abc import Iterator
from typing import get_args, get_type_hints

import pytest
from fastapi.testclient import TestClient

from pipeplan.documents.identity import content_id
from pipeplan.protocol.estimates import ModelPlanRequest
from pipeplan.protocol.jobs import LeaseRequest, LinksTask, PlanTask, Task
from pipeplan.protocol.plans import PlanRequest
from planner_service.aliases import service as aliases
from planner_service.app import create_app
from planner_service.jobs import service as jobs
from planner_service.overview.openapi import CLUSTER, PROFILE
from planner_service.plans import estimates
from planner_service.platform.context import Context
from planner_service.platform.migrations import upgrade
from planner_service.platform.settings import Settings
from tests.planner_service.answers import halve
from tests.planner_service.conftest import Clock
from tests.planner_service.dashboard_content import failed_run, finished_run, named_plan, register
from tests.planner_service.examples import PROFILE_TASK, request_document, run_task, store_plan
from tests.planner_service.html_pages import Page
from tests.planner_service.tokens import made

HTML = {"Accept": "text/html"}
OWN = {"Origin": "http://127.0.0.1", **HTML}


def _page(http: TestClient, address: str, status: int = 200) -> Page:
    answer = http.get(address, headers=HTML)
    assert answer.status_code == status, answer.text
    return Page(answer.text)


def _plan_ids(page: Page) -> list[str]:
    return [value for tag, name, value in page.attributes if tag == "input" and name == "value" and len(value) == 32]


def _link(page: Page, address: str) -> str:
    """The link of a page that starts so."""
    return next(link for link in page.links if link.startswith(address))


def test_the_history_goes_on_page_by_page_and_back_again(http: TestClient, context: Context) -> None:
    stored = [store_plan(context, batch_size=size) for size in (16, 32, 48, 64, 80)]
    first = _page(http, "/plans?limit=2")
    assert _plan_ids(first) == stored[:2:-1]
    assert "prev" not in first.related
    second = _page(http, first.related["next"])
    assert _plan_ids(second) == stored[2:0:-1]
    third = _page(http, second.related["next"])
    assert _plan_ids(third) == stored[:1]
    assert "next" not in third.related
    again = _page(http, third.related["prev"])
    assert _plan_ids(again) == stored[2:0:-1]
    assert _plan_ids(_page(http, again.related["prev"])) == stored[:2:-1]


def test_the_history_is_filtered_and_sorted_by_its_address(http: TestClient, context: Context) -> None:
    mine = named_plan(context, "mine & yours")
    store_plan(context)
    assert _plan_ids(_page(http, "/plans?model=mine+%26+yours&planner=&device=")) == [mine]
    page = _page(http, "/plans?sort=-throughput&schedule=1f1b")
    assert len(_plan_ids(page)) == 2
    assert ("th", "aria-sort", "descending") in page.attributes
    assert "sort=throughput" in _link(page, "/plans?schedule=1f1b&sort=throughput")
    assert "No plans pass these filters." in _page(http, "/plans?model=nothing").text


@pytest.mark.parametrize(
    ("query", "told"),
    [("sort=size", "sort"), ("cursor=x", "cursor"), ("estimated=perhaps", "estimated"), ("bogus=1", "bogus")],
)
def test_an_address_that_asks_for_what_is_not_there_is_told_so(http: TestClient, query: str, told: str) -> None:
    page = _page(http, f"/plans?{query}", 422)
    assert told in page.text
    assert "/plans" in page.links


def test_two_plans_side_by_side_show_what_differs_and_why_one_is_faster(http: TestClient, context: Context) -> None:
    small, large = store_plan(context, batch_size=16), store_plan(context, batch_size=64)
    page = _page(http, f"/compare?plan={small}&plan={large}")
    assert "What differs" in page.text
    assert re.search(r"Microbatches a batch 8 32", page.text)
    assert "Batch 16 64" in page.text
    drawn = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "class")]
    assert drawn.count("stages") == 2
    assert drawn.count("memory") == 2


def test_plans_to_compare_are_two_to_four(http: TestClient, context: Context) -> None:
    stored = [store_plan(context, batch_size=size) for size in (16, 32, 48, 64, 80)]
    assert "Nothing to compare yet." in _page(http, "/compare").text
    equal = _page(http, f"/compare?plan={stored[0]}&plan={stored[1]}").text
    assert "as fast as" in equal and "fastest" not in equal
    assert "cannot be compared" in _page(http, f"/compare?plan={stored[0]}&plan={stored[0]}").text
    assert "at most 4" in _page(http, "/compare?" + "&".join(f"plan={each}" for each in stored), 422).text
    assert "there is no plan" in _page(http, f"/compare?plan={stored[0]}&plan=nothing", 404).text


def test_a_plans_page_names_its_aliases_its_runs_and_what_it_was_made_from(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    run_id = finished_run(context, plan_id)
    aliases.put(context, "gpt/prod", plan_id, by="release")
    page = _page(http, f"/plans/{plan_id}")
    assert "/aliases/gpt/prod" in page.links
    assert "moved by release" in page.text
    assert f"/runs/{run_id}" in page.links
    assert "-20.0 %" in page.text
    assert any(link.startswith("/profiles/") for link in page.links)
    assert f"/v1/plans/{plan_id}" in page.links


def test_a_plans_page_says_who_asked_and_for_what(http: TestClient, context: Context) -> None:
    store_plan(context)
    request = request_document(batch_size=24, options={"optimizer": "adam"})
    plan_id = http.post("/v1/plans", json=request).json()["id"]
    page = _page(http, f"/plans/{plan_id}")
    assert "asked by local" in page.text
    assert "batch size 24" in page.text
    assert "optimizer adam" in page.text
    job = http.post("/v1/jobs", json=PROFILE_TASK.model_dump(mode="json")).json()
    assert "asked for by local" in _page(http, f"/jobs/{job['id']}").text


def test_an_export_that_cannot_be_is_named_with_its_reason_and_not_linked(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    page = _page(http, f"/plans/{plan_id}")
    exports = f"/v1/plans/{plan_id}/exports/"
    linked = {link.removeprefix(exports) for link in page.links if link.startswith(exports)}
    assert {"torchrun", "slurm", "chrome-trace"} <= linked
    assert "torchtitan" not in linked
    assert "it trains with Adam and AdamW only" in page.text
    for name in linked:
        assert http.get(exports + name).status_code == 200


def test_an_aliass_page_shows_who_moved_it_and_compares(http: TestClient, context: Context) -> None:
    old, new = store_plan(context, batch_size=16), store_plan(context, batch_size=32)
    aliases.put(context, "gpt", old, by="ada")
    aliases.put(context, "gpt", new, by="grace")
    page = _page(http, "/aliases/gpt")
    assert f"/compare?plan={new}&plan={old}" in page.links
    assert page.text.index("grace") < page.text.index("ada")
    aliases.delete(context, "gpt", by="ada")
    assert "It was deleted" in _page(http, "/aliases/gpt").text


def test_a_profile_is_shown_at_a_size_that_was_measured(http: TestClient, context: Context) -> None:
    store_plan(context)
    profile = next(link for link in _page(http, "/profiles").links if re.fullmatch(r"/profiles/[0-9a-f]{32}", link))
    assert "8 ms" in _page(http, f"{profile}?microbatch_size=2").text
    assert "must be one that was measured: 1, 2" in _page(http, f"{profile}?microbatch_size=3", 422).text


def test_agents_are_shown_with_what_they_have_and_lost_when_they_are_silent(
    http: TestClient, context: Context, clock: Clock
) -> None:
    register(context, "node-7")
    assert "node-7 alive" in _page(http, "/agents").text
    clock.advance(3600)
    assert "node-7 lost" in _page(http, "/agents").text
    assert "1 hour ago" in _page(http, "/agents").text


def test_a_job_of_every_kind_is_shown(http: TestClient, context: Context) -> None:
    """A job that measures links has no model: once there was one, the first page and the list were a 500."""
    plan_id = store_plan(context)
    profile_id, cluster_id = content_id(PROFILE), content_id(CLUSTER)
    asked = PlanRequest(profile_id=profile_id, cluster_id=cluster_id, planner="gpipe", batch_size=16)
    tasks = (PROFILE_TASK, run_task(plan_id), LinksTask(devices=4, nodes=2), PlanTask(request=asked))
    stored = [jobs.enqueue(context, task) for task in tasks]
    model = ModelPlanRequest(model="hf:gpt2", cluster_id="dgx-a100:2", planner="gpipe", batch_size=16)
    stored.append(estimates.enqueue(context, model))
    kinds = {get_args(get_type_hints(kind)["kind"])[0] for kind in get_args(get_args(Task)[0])}
    assert {job.task.kind for job in stored} == kinds | {"estimate"}
    first, listed = (http.get(address, headers=HTML).text for address in ("/", "/jobs"))
    assert f"/jobs/{stored[0].id}" in first and "2 x 4 devices" in first
    for job in stored:
        assert f"/jobs/{job.id}" in listed
        _page(http, f"/jobs/{job.id}")


def test_a_job_is_cancelled_and_tried_again_by_its_buttons(http: TestClient, context: Context) -> None:
    job = jobs.enqueue(context, PROFILE_TASK)
    form = _page(http, f"/jobs/{job.id}").forms[-1]
    assert (form.method, form.action) == ("post", f"/jobs/{job.id}/cancel")
    answer = http.post(form.action, headers=OWN, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{job.id}")
    assert jobs.get(context, job.id).state == "cancelled"
    assert http.post(_page(http, f"/jobs/{job.id}").forms[-1].action, headers=OWN).status_code == 200
    assert jobs.get(context, job.id).state == "queued"


@pytest.mark.each_case
@pytest.mark.parametrize("headers", [{}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
def test_a_button_of_another_sites_page_does_nothing(
    http: TestClient, context: Context, headers: dict[str, str]
) -> None:
    job = jobs.enqueue(context, PROFILE_TASK)
    assert http.post(f"/jobs/{job.id}/cancel", headers=headers).status_code == 403
    assert jobs.get(context, job.id).state == "queued"


def test_what_is_under_way_follows_its_events_and_is_read_again_without_scripts(
    http: TestClient, context: Context
) -> None:
    job = jobs.enqueue(context, run_task(store_plan(context)))
    jobs.lease(context, LeaseRequest(agent="node-1"))
    for address, events in (
        (f"/jobs/{job.id}", f"/v1/jobs/{job.id}/events"),
        (f"/runs/{job.run_id}", f"/v1/runs/{job.run_id}/events"),
    ):
        page = _page(http, address)
        assert ("p", "data-events", events) in page.attributes
        assert ("meta", "http-equiv", "refresh") in page.attributes
        assert "/static/live.js" in page.loaded
    jobs.cancel(context, job.id)
    assert not [name for _, name, _ in _page(http, f"/jobs/{job.id}").attributes if name == "data-events"]


def test_a_failed_runs_page_leads_to_its_job(http: TestClient, context: Context) -> None:
    run_id = failed_run(context, store_plan(context), "rank 1 ran out of memory at F3")
    page = _page(http, f"/runs/{run_id}")
    assert "rank 1 ran out of memory at F3" in page.text
    assert "Retry" in _page(http, _link(page, "/jobs/")).text


@pytest.fixture
def guarded(database_url: str, clock: Clock) -> Iterator[TestClient]:
    """A service that demands tokens."""
    app = create_app(Settings(database_url=database_url, require_tokens=True), now=clock, solve=halve)
    upgrade(app.state.context.database)
    made(app.state.context, "admin", name="first")
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def test_whoever_logs_in_sees_who_they_are_and_the_buttons_that_they_may_press(guarded: TestClient) -> None:
    context: Context = guarded.app.state.context  # type: ignore[attr-defined]
    job = jobs.enqueue(context, PROFILE_TASK)
    login = _page(guarded, f"/jobs/{job.id}", 401)
    assert login.forms[-1].action == "/login"
    assert login.forms[-1].fields == ["next", "token", ""]
    assert "/plans" not in login.links
    for scope, buttons in (("read", ["/logout"]), ("plan", ["/logout", f"/jobs/{job.id}/cancel"])):
        token = made(context, scope, name=f"ada-{scope}")  # type: ignore[arg-type]
        fields = {"next": f"/jobs/{job.id}", "token": token}
        page = Page(guarded.post("/login", data=fields, headers=OWN).text)
        assert f"ada-{scope}" in page.text
        assert [form.action for form in page.forms] == buttons
    guarded.cookies.clear()
    assert "not valid" in guarded.post("/login", data={"token": "wrong"}, headers=OWN).text


def test_a_reader_cannot_press_a_button_that_is_not_shown(guarded: TestClient) -> None:
    context: Context = guarded.app.state.context  # type: ignore[attr-defined]
    job = jobs.enqueue(context, PROFILE_TASK)
    guarded.post("/login", data={"token": made(context, "read", name="ada")}, headers=OWN)
    assert guarded.post(f"/jobs/{job.id}/cancel", headers=OWN).status_code == 403
    assert jobs.get(context, job.id).state == "queued"
