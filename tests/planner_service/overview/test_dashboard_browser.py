"""The dashboard in a real browser: nothing is refused, nothing overflows, keys are enough, progress moves by itself."""

import json
from collections.abc import Iterator

import httpx
import pytest

from pipeplan.documents.files import dump, parse_plan
from pipeplan.protocol.jobs import Completion
from planner_service.overview.openapi import CLUSTER, PLAN_REQUEST, PROFILE
from tests.planner_service.chromium import Tab, browsing, found
from tests.planner_service.dashboard_content import NAMES
from tests.planner_service.examples import run_result
from tests.planner_service.overview.page_scripts import (
    COLOURS,
    CONTRASTS,
    LEGEND,
    MISNAMED,
    OVERFLOWING,
    UNREACHABLE,
    UNTIL,
    VIEW,
    WORDS,
)
from tests.planner_service.servers import pipeplan, served
from tests.waiting import PATIENCE_S

PROGRAM = found()
TAB = ("Tab", 9)
ENTER = ("Enter", 13)

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed: `apt-get install chromium`")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service of its own process with a plan, a long name and a run that waits."""
    database = tmp_path_factory.mktemp("service") / "service.sqlite3"
    with served(database) as url, httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        _fill(client)
        yield client


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A browser's tab."""
    with browsing(str(PROGRAM), tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_complaints(tab: Tab) -> Iterator[None]:
    """Whatever a test looks at, the browser has nothing to complain of."""
    tab.complaints.clear()
    yield
    assert not tab.complaints


def _fill(client: httpx.Client) -> None:
    document = json.loads(dump(PROFILE))
    client.post("/v1/clusters", json=json.loads(dump(CLUSTER))).raise_for_status()
    for name in ("gpt2-small-4", *NAMES):
        profile = document | {"model": {"name": name}}
        profile_id = client.post("/v1/profiles", json=profile).raise_for_status().json()["id"]
        request = PLAN_REQUEST.model_dump(mode="json") | {"profile_id": profile_id}
        plan_id = client.post("/v1/plans", json=request).raise_for_status().json()["id"]
    _enqueued(client, plan_id)


def _addresses(client: httpx.Client) -> list[str]:
    """A page of every kind."""
    plans = [plan["id"] for plan in client.get("/v1/plans").json()["items"]]
    job = _enqueued(client, plans[-1])
    one_each = [f"/{noun}/{client.get(f'/v1/{noun}').json()['items'][0]['id']}" for noun in ("profiles", "clusters")]
    lists = [
        "/",
        "/plans",
        "/plans/new",
        "/aliases",
        "/profiles",
        "/clusters",
        "/runs",
        "/jobs",
        "/agents",
        "/login",
        "/nothing",
    ]
    compared = "/compare?" + "&".join(f"plan={plan}" for plan in plans[:4])
    return [*lists, compared, *one_each, *(f"/plans/{plan}" for plan in plans[:3]), f"/jobs/{job['id']}"]


def _enqueued(client: httpx.Client, plan_id: str) -> dict[str, str]:
    task = {
        "kind": "run",
        "plan_id": plan_id,
        "model": "hf:gpt2",
        "data": "worker_agent.models.text:random_tokens?vocab_size=50257",
        "steps": 4,
    }
    job: dict[str, str] = client.post("/v1/jobs", json=task).raise_for_status().json()
    return job


@pytest.mark.each_case
@pytest.mark.parametrize(("width", "dark"), [(400, False), (1600, True)])
def test_no_page_is_wider_than_the_screen_or_refused_anything(
    service: httpx.Client, tab: Tab, width: int, dark: bool
) -> None:
    for address in _addresses(service):
        tab.show(f"{service.base_url}{address}", width=width, dark=dark)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, address
        assert tab.evaluate("getComputedStyle(document.body).fontSize") == "14px", address
        tab.complaints[:] = [each for each in tab.complaints if "404" not in each or address != "/nothing"]


@pytest.mark.each_case
@pytest.mark.parametrize("width", [375, 768, 1024, 1280, 1440, 1920])
def test_no_list_is_wider_than_its_frame(service: httpx.Client, tab: Tab, width: int) -> None:
    for address in ("/", "/plans", "/profiles", "/clusters", "/jobs", "/runs"):
        tab.show(f"{service.base_url}{address}", width=width)
        assert tab.evaluate("document.querySelectorAll('.fits').length") > 0, address
        assert tab.evaluate(OVERFLOWING) == [], address


def test_what_scrolls_sideways_on_a_narrow_screen_does_so_with_keys(service: httpx.Client, tab: Tab) -> None:
    """The instructions of a plan's first batch could only be scrolled by hand."""
    for address in _addresses(service):
        tab.show(f"{service.base_url}{address}", width=375)
        assert tab.evaluate(UNREACHABLE) == [], address
        tab.complaints[:] = [each for each in tab.complaints if "404" not in each or address != "/nothing"]


def test_how_long_ago_something_was_grows_while_one_looks(service: httpx.Client, tab: Tab) -> None:
    """The page of a run that went on for a minute said all the time that it was asked for 2 seconds ago."""
    tab.show(f"{service.base_url}/plans")
    tab.evaluate("document.querySelector('.age').textContent = 'made'")
    tab.evaluate(UNTIL % "/^(just now|\\d+ .* ago)$/.test(document.querySelector('.age').textContent)")


def test_a_lone_chart_of_the_overview_is_not_blown_up(service: httpx.Client, tab: Tab) -> None:
    """With nothing failed beside it, the chart of the predictions was 1,300 points wide, its lines 5 thick."""
    _measured_run(service)
    tab.show(f"{service.base_url}/", width=1920)
    widths = tab.evaluate("[...document.querySelectorAll('.spark')].map((each) => each.clientWidth)")
    assert widths and max(widths) <= 560


def test_a_narrow_list_labels_its_fields_and_can_still_be_sorted(service: httpx.Client, tab: Tab) -> None:
    tab.show(f"{service.base_url}/plans", width=375)
    label = "getComputedStyle(document.querySelector('.fits td:nth-child(5)'), '::before').content"
    assert tab.evaluate(label) == '"Throughput"'
    sorts = "[...document.querySelectorAll('.fits th a')].filter((a) => a.checkVisibility()).map((a) => a.textContent)"
    assert tab.evaluate(sorts) == ["Throughput", "Memory", "Made ↓"]


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_what_is_behind_it(service: httpx.Client, tab: Tab, dark: bool) -> None:
    for address in ("", "plans", "plans/new", "runs", "jobs", "compare"):
        tab.show(f"{service.base_url}/{address}", dark=dark)
        assert tab.evaluate(CONTRASTS) == [], address


def test_landmarks_and_controls_are_named_as_they_are_seen(service: httpx.Client, tab: Tab) -> None:
    run_id = _measured_run(service)
    plan_id = service.get("/v1/plans").json()["items"][-1]["id"]
    for address in ("", "plans", "plans/new", "runs", "jobs", f"runs/{run_id}", f"plans/{plan_id}"):
        tab.show(f"{service.base_url}/{address}")
        if "/" in address and "new" not in address:
            tab.evaluate(UNTIL % "document.querySelector('[data-drawn]')")
        assert tab.evaluate(MISNAMED) == [], address
    tab.show(f"{service.base_url}/runs/calibrate?run={run_id}", width=375)
    assert tab.evaluate(MISNAMED) == []
    assert tab.evaluate(OVERFLOWING) == []


def test_keys_are_enough_to_get_past_the_head_and_to_follow_a_link(service: httpx.Client, tab: Tab) -> None:
    tab.show(f"{service.base_url}/plans")
    tab.press(*TAB)
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert tab.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    for _ in range(3):
        tab.press(*TAB)
    assert tab.evaluate("document.activeElement.getAttribute('href')") == "/aliases"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    before = tab.loads
    tab.evaluate("document.activeElement.click()")
    tab.wait_for_load(before)
    assert tab.evaluate("location.pathname") == "/aliases"


def test_ticked_plans_are_compared(service: httpx.Client, tab: Tab) -> None:
    tab.show(f"{service.base_url}/plans")
    before = tab.loads
    tab.evaluate("document.querySelectorAll('input[name=plan]').forEach((box, i) => { box.checked = i < 2; })")
    tab.evaluate("document.querySelector('form[action=\"/compare\"] button').click()")
    tab.wait_for_load(before)
    assert tab.evaluate("location.pathname") == "/compare"
    assert tab.evaluate("document.querySelectorAll('svg.stages').length") == 2


def test_progress_moves_and_the_end_is_shown_without_a_hand(service: httpx.Client, tab: Tab) -> None:
    plan_id = service.get("/v1/plans").json()["items"][-1]["id"]
    for job in service.get("/v1/jobs?state=queued").json()["items"]:
        service.post(f"/v1/jobs/{job['id']}/cancel", json={}).raise_for_status()
    job = _enqueued(service, plan_id)
    lease = service.post("/v1/jobs/lease", json={"agent": "node-1"}).raise_for_status().json()
    assert lease["job"]["id"] == job["id"]
    tab.show(f"{service.base_url}/jobs/{job['id']}")
    progress = {"done": 3, "total": 4, "message": "step 3"}
    beat = {"token": lease["token"], "progress": progress}
    service.post(f"/v1/jobs/{job['id']}/heartbeat", json=beat).raise_for_status()
    tab.evaluate(UNTIL % "document.querySelector('.progress-text').textContent === '3 of 4, step 3'")
    assert tab.evaluate("document.querySelector('progress').value") == 3
    before = tab.loads
    service.post(f"/v1/jobs/{job['id']}/cancel").raise_for_status()
    tab.wait_for_load(before)
    assert tab.evaluate("document.querySelector('h1 .state').textContent") == "cancelled"


def test_the_first_page_reads_itself_again(service: httpx.Client, tab: Tab) -> None:
    tab.show(f"{service.base_url}/")
    job = _enqueued(service, service.get("/v1/plans").json()["items"][-1]["id"])
    before = tab.loads
    tab.evaluate("document.getElementById('overview').dataset.refresh = 0.2")  # from its first time on
    tab.evaluate(UNTIL % f"document.querySelector('a[href=\"/jobs/{job['id']}\"]')")
    service.post(f"/v1/jobs/{job['id']}/cancel").raise_for_status()
    tab.evaluate(UNTIL % f"!document.querySelector('#now a[href=\"/jobs/{job['id']}\"]')")
    assert tab.loads == before


def test_the_form_is_checked_as_one_types_and_makes_a_plan(service: httpx.Client, tab: Tab) -> None:
    tab.show(f"{service.base_url}/plans/new")
    enter = """(text) => {
      const field = document.querySelector("input[name=batch_size]");
      field.value = text;
      field.dispatchEvent(new Event("input", { bubbles: true }));
    }"""
    tab.evaluate(f"({enter})('0')")
    tab.evaluate(UNTIL % "document.querySelector('#checked .error')?.textContent.includes('batch_size: ')")
    tab.evaluate(f"({enter})('96')")
    tab.evaluate(UNTIL % "document.querySelector('#checked pre')?.textContent.includes('--batch-size 96')")
    before = tab.loads
    tab.evaluate("document.querySelector('button.main').click()")
    tab.wait_for_load(before)
    plan_id = tab.evaluate("location.pathname").removeprefix("/plans/")
    assert service.get(f"/v1/plans/{plan_id}").raise_for_status().json()["batch_size"] == 96


def test_a_job_is_cancelled_by_its_button(service: httpx.Client, tab: Tab) -> None:
    job = _enqueued(service, service.get("/v1/plans").json()["items"][-1]["id"])
    tab.show(f"{service.base_url}/jobs/{job['id']}")
    before = tab.loads
    tab.evaluate("document.querySelector('form button.danger').click()")
    tab.wait_for_load(before)
    assert service.get(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled"


@pytest.mark.campaign
def test_whoever_has_a_token_logs_in_presses_a_button_and_logs_out(
    tab: Tab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = tmp_path_factory.mktemp("guarded") / "service.sqlite3"
    made = pipeplan("token", "create", "--name", "ada", "--scope", "plan", "--database", f"sqlite:///{database}")
    token = made.stdout.strip()
    with served(database, PIPEPLAN_REQUIRE_TOKENS="true") as url:
        task = {"kind": "profile", "model": "hf:gpt2", "microbatch_sizes": [1]}
        bearer = {"Authorization": f"Bearer {token}"}
        job_id = httpx.post(f"{url}/v1/jobs", json=task, headers=bearer).raise_for_status().json()["id"]
        tab.show(f"{url}/jobs/{job_id}")
        tab.complaints[:] = [each for each in tab.complaints if "401" not in each]
        before = tab.loads
        tab.evaluate(f"document.querySelector('#token').value = '{token}'")
        tab.evaluate("document.querySelector('.login button').click()")
        tab.wait_for_load(before)
        assert tab.evaluate("location.pathname") == f"/jobs/{job_id}"
        assert tab.evaluate("document.querySelector('.who bdi').textContent") == "ada"
        assert tab.evaluate("document.cookie") == ""
        before = tab.loads
        tab.evaluate("document.querySelector('form button.danger').click()")
        tab.wait_for_load(before)
        assert tab.evaluate("document.querySelector('h1 .state').textContent") == "cancelled"
        before = tab.loads
        tab.evaluate("document.querySelector('.who button').click()")
        tab.wait_for_load(before)
        assert tab.evaluate("location.pathname") == "/login"


def _measured_run(service: httpx.Client) -> str:
    """A run of the oldest plan that took a quarter longer than predicted; its id."""
    plan_id = service.get("/v1/plans").json()["items"][-1]["id"]
    for job in service.get("/v1/jobs?state=queued").json()["items"]:
        service.post(f"/v1/jobs/{job['id']}/cancel", json={}).raise_for_status()
    job = _enqueued(service, plan_id)
    token = service.post("/v1/jobs/lease", json={"agent": "node-1"}).raise_for_status().json()["token"]
    result = run_result(parse_plan(service.get(f"/v1/plans/{plan_id}").text))
    completion = Completion(token=token, result=result).model_dump_json()
    sent = service.post(
        f"/v1/jobs/{job['id']}/complete", content=completion, headers={"Content-Type": "application/json"}
    )
    return str(sent.raise_for_status().json()["run_id"])


def _drawn(service: httpx.Client, tab: Tab, *, width: int = 1280, dark: bool = False) -> str:
    """Shows the oldest plan and waits until its timeline is drawn; the plan's id."""
    plan_id = str(service.get("/v1/plans").json()["items"][-1]["id"])
    tab.show(f"{service.base_url}/plans/{plan_id}", width=width, dark=dark)
    tab.evaluate(UNTIL % "document.querySelector('[data-drawn]')")
    return plan_id


@pytest.mark.parametrize(("width", "dark"), [(375, False), (768, True), (1920, False)])
def test_a_timeline_is_drawn_in_the_colours_of_its_kinds(
    service: httpx.Client, tab: Tab, width: int, dark: bool
) -> None:
    plan_id = _drawn(service, tab, width=width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    timeline = service.get(f"/v1/plans/{plan_id}/timeline?batches=2").json()
    label = tab.evaluate("document.querySelector('canvas').getAttribute('aria-label')")
    assert f"{len(timeline['lanes'])} ranks" in label
    assert {"Forward", "Backward"} <= set(tab.evaluate(LEGEND))
    colours = tab.evaluate(COLOURS)
    assert colours["forward"] > 100
    assert colours["backward"] > 100


def test_keys_zoom_a_timeline_and_go_from_instruction_to_instruction(service: httpx.Client, tab: Tab) -> None:
    plan_id = _drawn(service, tab)
    timeline = service.get(f"/v1/plans/{plan_id}/timeline?batches=2").json()
    lane = next(lane for lane in timeline["lanes"] if lane["rank"] == tab.evaluate(f"{VIEW}.chosen.lane"))
    takes_time = [
        text
        for text, start, end in zip(lane["instructions"], lane["start_s"], lane["end_s"], strict=True)
        if end > start
    ]
    tab.evaluate("document.querySelector('canvas').focus()")
    for text in takes_time[:3]:
        tab.press(".", 190)
        assert f"Rank {lane['rank']}, {text}: " in tab.evaluate(WORDS)
        assert tab.evaluate("document.querySelector('.mark').hidden") is False
    tab.press(",", 188)
    assert f", {takes_time[1]}: " in tab.evaluate(WORDS)

    span_s = tab.evaluate(f"{VIEW}.to - {VIEW}.from")
    tab.press("+", 187)
    assert tab.evaluate(f"{VIEW}.to - {VIEW}.from") == pytest.approx(span_s / 2)
    tab.press("ArrowRight", 39)
    assert tab.evaluate(f"{VIEW}.from") > 0
    tab.press("0", 48)
    assert tab.evaluate(f"{VIEW}.to - {VIEW}.from") == pytest.approx(span_s)


def test_what_the_pointer_is_over_is_named_with_its_times(service: httpx.Client, tab: Tab) -> None:
    plan_id = _drawn(service, tab)
    lane = service.get(f"/v1/plans/{plan_id}/timeline?batches=2").json()["lanes"][0]
    tab.evaluate(f"{VIEW}.point({VIEW}.x({lane['end_s'][0]} / 2), 24)")
    assert lane["instructions"][0] == "F1"
    assert "Rank 0, F1: Forward of microbatch 1 on weight version 0; " in tab.evaluate(WORDS)
    assert tab.evaluate("document.querySelector('.tip').textContent") == tab.evaluate(WORDS)
    tab.evaluate(f"{VIEW}.point(1, 1)")
    assert tab.evaluate("document.querySelector('.tip').hidden")


def test_a_drag_moves_the_timeline_and_chooses_nothing(service: httpx.Client, tab: Tab) -> None:
    _drawn(service, tab)
    tab.evaluate(f"{VIEW}.zoom(0.1, 92)")
    tab.evaluate(DRAG)
    assert tab.evaluate(f"{VIEW}.from / ({VIEW}.to - {VIEW}.from)") == pytest.approx(
        tab.evaluate(f"200 / {VIEW}.width"), rel=1e-3
    )
    assert tab.evaluate(f"{VIEW}.chosen.event") is None


def test_a_run_is_drawn_as_predicted_over_as_measured(service: httpx.Client, tab: Tab) -> None:
    run_id = _measured_run(service)
    tab.show(f"{service.base_url}/runs/{run_id}")
    tab.evaluate(UNTIL % "document.querySelector('[data-drawn]')")
    tab.evaluate("document.querySelector('canvas').focus()")
    tab.press(".", 190)
    words = tab.evaluate(WORDS)
    assert "; predicted " in words
    assert "(+25 %)" in words
    y = tab.evaluate(f"{VIEW}.bands(0, {VIEW}.high)[0][2] + 24")
    tab.evaluate(f"{VIEW}.point({VIEW}.x({VIEW}.span / 2), {y})")
    assert tab.evaluate(f"{VIEW}.under({VIEW}.x({VIEW}.span / 2), {y}).timeline === {VIEW}.predicted")
    # Both bands are as long as they take: the lower one ends last.
    assert tab.evaluate(f"{VIEW}.span / {VIEW}.predicted.span") == pytest.approx(1.25)


def test_the_browser_reads_columns_as_they_are_written(service: httpx.Client, tab: Tab) -> None:
    plan_id = _drawn(service, tab)
    timeline = service.get(f"/v1/plans/{plan_id}/timeline?batches=2").json()
    read = tab.evaluate(READ % f"/v1/plans/{plan_id}/timeline/columns?batches=2")
    for lane, (texts, starts, ends, held) in zip(timeline["lanes"], read, strict=True):
        assert texts == lane["instructions"]
        assert held == lane["memory_bytes"]
        assert starts == pytest.approx(lane["start_s"], rel=1e-6, abs=1e-9)
        assert ends == pytest.approx(lane["end_s"], rel=1e-6, abs=1e-9)


def test_every_chart_becomes_a_picture_in_the_colours_of_the_page(service: httpx.Client, tab: Tab) -> None:
    _drawn(service, tab)
    named = tab.evaluate("[...document.querySelectorAll('[data-png]')].map((link) => link.dataset.png)")
    names = [name.rpartition("-")[2] for name in named]
    blue, orange = 0x3D7FF5, 0xE0912F  # what is drawn of this plan: its slowest stages and its place are orange
    expected = {"stages": orange, "memory": blue, "front": blue, "search": orange}
    assert names == list(expected)
    for name, colour in expected.items():
        width, height, colours = tab.evaluate(PICTURE % name)
        assert width == 2 * 1200
        assert height > 2 * 46
        assert colour in colours, name
        assert 0xFFFFFF in colours


@pytest.mark.campaign
def test_the_charts_of_compared_plans_become_pictures_each_of_its_plan(service: httpx.Client, tab: Tab) -> None:
    plans = [plan["id"] for plan in service.get("/v1/plans").json()["items"][:2]]
    tab.show(f"{service.base_url}/compare?plan={plans[0]}&plan={plans[1]}")
    files = tab.evaluate("[...document.querySelectorAll('[data-png]')].map((link) => [link.dataset.png, link.href])")
    charts = [(chart, plan) for chart in ("stages", "memory") for plan in plans]
    for (chart, plan), (name, address) in zip(charts, files, strict=True):
        assert name == f"plan-{plan[:10]}-{chart}"
        assert address == f"{service.base_url}/v1/plans/{plan}/charts/{chart}.svg"
        assert tab.evaluate(f"document.querySelector('[data-png={name}] + button').textContent") == "PNG"
        width, height, colours = tab.evaluate(PICTURE % f"{plan[:10]}-{chart}")
        assert width == 2 * 1200
        assert height > 2 * 46
        assert len(colours) > 2


@pytest.mark.campaign
def test_a_chart_of_the_first_page_becomes_a_picture_after_the_page_has_renewed_itself(
    service: httpx.Client, tab: Tab
) -> None:
    _measured_run(service)
    tab.show(f"{service.base_url}/")
    tab.evaluate("window.saved = []; HTMLAnchorElement.prototype.click = function () { saved.push(this.download); }")
    job = _enqueued(service, service.get("/v1/plans").json()["items"][-1]["id"])
    tab.evaluate(UNTIL % f"document.querySelector('a[href=\"/jobs/{job['id']}\"]')")
    tab.evaluate("document.querySelector('#errors button.png').click()")
    tab.evaluate(UNTIL % "saved.length")
    assert tab.evaluate("saved") == ["errors.png"]
    service.post(f"/v1/jobs/{job['id']}/cancel").raise_for_status()


def test_the_search_is_shown_by_the_degrees_that_are_chosen(service: httpx.Client, tab: Tab) -> None:
    _drawn(service, tab)
    before = tab.loads
    tab.evaluate("document.querySelector('[name=across]').value = 'microbatch_size'")
    tab.evaluate("document.querySelector('[name=down]').value = 'schedule'")
    tab.evaluate("document.querySelector('#search button').click()")
    tab.wait_for_load(before)
    label = tab.evaluate("document.querySelector('#search svg').getAttribute('aria-label')")
    assert label.endswith("by microbatch size and schedule")
    assert tab.evaluate("document.querySelectorAll('#search .cell.chosen').length") == 1


PICTURE = """(async () => {
  const { drawn } = await import("/static/charts.js");
  const canvas = await drawn(document.querySelector("[data-png$='-%s']").href);
  const cells = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < cells.length; i += 4) colours.add((cells[i] << 16) + (cells[i + 1] << 8) + cells[i + 2]);
  return [canvas.width, canvas.height, [...colours]];
})()"""

DRAG = """(() => {
  const canvas = document.querySelector(".timeline canvas");
  const box = canvas.getBoundingClientRect();
  const at = (kind, x, made = PointerEvent) =>
    canvas.dispatchEvent(new made(kind, { pointerId: 1, clientX: box.left + x, clientY: box.top + 30, bubbles: true }));
  canvas.setPointerCapture = () => {};
  at("pointerdown", 400);
  at("pointermove", 300);
  at("pointermove", 200);
  at("pointerup", 200);
  at("click", 200, MouseEvent);
})()"""

READ = """(async () => {
  const { textOf, unpacked } = await import("/static/columns.js");
  const timeline = unpacked(await (await fetch("%s")).json());
  return timeline.lanes.map((lane) => [
    lane.words.map((_, i) => textOf(timeline, lane, i)), [...lane.start], [...lane.end], [...lane.held],
  ]);
})()"""
