"""The dashboard in a real browser: nothing is refused, nothing overflows, keys are enough, progress moves by itself."""

import json
from collections.abc import Iterator

import httpx
import pytest

from pipeplan.documents.files import dump
from planner_service.overview.openapi import CLUSTER, PLAN_REQUEST, PROFILE
from tests.planner_service.chromium import Tab, browsing, found
from tests.planner_service.dashboard_content import NAMES
from tests.planner_service.servers import pipeplan, serving

PROGRAM = found()
TAB = ("Tab", 9)
ENTER = ("Enter", 13)

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed: `apt-get install chromium`")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service of its own process with a plan, a long name and a run that waits."""
    database = tmp_path_factory.mktemp("service") / "service.sqlite3"
    with serving(database) as (url, _), httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
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


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1600, True)])
def test_no_page_is_wider_than_the_screen_or_refused_anything(
    service: httpx.Client, tab: Tab, width: int, dark: bool
) -> None:
    for address in _addresses(service):
        tab.show(f"{service.base_url}{address}", width=width, dark=dark)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, address
        assert tab.evaluate("getComputedStyle(document.body).fontSize") == "14px", address
        tab.complaints[:] = [each for each in tab.complaints if "404" not in each or address != "/nothing"]


@pytest.mark.parametrize("width", [375, 768, 1024, 1280, 1440, 1920])
def test_no_list_is_wider_than_its_frame(service: httpx.Client, tab: Tab, width: int) -> None:
    for address in ("/", "/plans", "/profiles", "/clusters", "/jobs", "/runs"):
        tab.show(f"{service.base_url}{address}", width=width)
        assert tab.evaluate("document.querySelectorAll('.fits').length") > 0, address
        assert tab.evaluate(OVERFLOWING) == [], address


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


def test_whoever_has_a_token_logs_in_presses_a_button_and_logs_out(
    tab: Tab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = tmp_path_factory.mktemp("guarded") / "service.sqlite3"
    made = pipeplan("token", "create", "--name", "ada", "--scope", "plan", "--database", f"sqlite:///{database}")
    token = made.stdout.strip()
    with serving(database, PIPEPLAN_REQUIRE_TOKENS="true") as (url, _):
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


OVERFLOWING = """[...document.querySelectorAll(".fits")]
  .filter((list) => list.scrollWidth > list.clientWidth)
  .map((list) => `${list.getAttribute("aria-label")} ${list.scrollWidth} > ${list.clientWidth}`)"""
"""The lists that can be scrolled sideways."""

UNTIL = """new Promise((resolve, reject) => {
  const give = setTimeout(() => reject(new Error("never")), 20000);
  const look = () => { if (%s) { clearTimeout(give); resolve(true); } else setTimeout(look, 20); };
  look();
})"""

CONTRASTS = """(() => {
  const parsed = (colour) => {
    const [r, g, b, a] = colour.match(/[\\d.]+/g).map(Number);
    return { rgb: [r, g, b], opaque: (a ?? 1) === 1 };
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const back = parsed(getComputedStyle(element).backgroundColor);
    return back.opaque ? back.rgb : behind(element.parentElement);
  };
  const written = (element) => [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const ratio = (element) => {
    const colour = parsed(getComputedStyle(element).color).rgb;
    const [less, more] = [light(colour), light(behind(element))].sort((x, y) => x - y);
    return (more + 0.05) / (less + 0.05);
  };
  return [...document.querySelectorAll("body *:not(svg, svg *)")]
    .filter((element) => written(element) && element.checkVisibility() && ratio(element) < 4.5)
    .map((element) => `${element.tagName}.${element.className} ${ratio(element).toFixed(2)}`);
})()"""
"""What has text of less contrast than WCAG 2.1's 4.5 to 1."""
