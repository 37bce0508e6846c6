"""The service under a path of a shared host: everything that leads back has the path, whatever a proxy does."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

import pytest
from fastapi.testclient import TestClient

from pipeplan.client.client import Client
from pipeplan.errors import InvalidInputError
from planner_service.app import create_app
from planner_service.platform.context import Context
from planner_service.platform.settings import Settings, load_settings
from tests.planner_service.answers import halve
from tests.planner_service.conftest import Clock
from tests.planner_service.dashboard_content import filled
from tests.planner_service.examples import PROFILE_TASK, profile_document
from tests.planner_service.html_pages import Page
from tests.planner_service.servers import served
from tests.planner_service.tokens import made

BASE = "/pipeplan"
HTML = {"Accept": "text/html"}
ADDRESSES = frozenset({"href", "src", "action", "formaction", "data-events", "data-timeline"})
MOST_PAGES = 600


@pytest.fixture
def under(sqlite_url: str, clock: Clock) -> Iterator[TestClient]:
    """A service under the path, at whose host's root the client stands."""
    app = create_app(Settings(database_url=sqlite_url, base_path=BASE), now=clock, solve=halve)
    with TestClient(app, base_url="http://127.0.0.1", follow_redirects=False) as client:
        yield client


def _context(client: TestClient) -> Context:
    context: Context = client.app.state.context  # type: ignore[attr-defined]
    return context


def _addresses(page: Page) -> set[str]:
    """Every address in a page that is not of another host or within the page."""
    found = {value for _, name, value in page.attributes if name in ADDRESSES and value}
    return {urldefrag(address).url for address in found if address.startswith("/")}


def test_every_address_in_every_page_has_the_path_and_leads_somewhere(under: TestClient) -> None:
    filled(_context(under))
    seen: set[tuple[str, str]] = set()
    ahead = [f"{BASE}/", f"{BASE}/login"]
    forms: set[str] = set()
    while ahead:
        address = ahead.pop()
        kind = urlsplit(address)
        if (kind.path, kind.query.partition("=")[0]) in seen or "/events" in address:
            continue
        seen.add((kind.path, kind.query.partition("=")[0]))
        assert len(seen) < MOST_PAGES
        answer = under.get(address, headers=HTML)
        assert answer.status_code == 200, (address, answer.text[:300])
        if answer.status_code == 200 and answer.headers["content-type"].startswith("text/html"):
            page = Page(answer.text)
            found = _addresses(page)
            assert all(one.startswith(f"{BASE}/") for one in found), (address, found)
            forms |= {form.action for form in page.forms}
            ahead += found - {form.action for form in page.forms}
    kinds = {path.split("/")[2] for path, _ in seen}
    expected = {"", "plans", "aliases", "profiles", "clusters", "runs", "jobs", "agents", "audit", "compare", "login"}
    assert expected | {"static", "v1"} <= kinds
    assert {f"{BASE}/plans/new", f"{BASE}/login"} <= forms


def test_the_frameworks_own_redirects_stay_under_the_path(under: TestClient) -> None:
    led = under.get(f"{BASE}/v1/plans/")
    assert (led.status_code, led.headers["Location"]) == (307, f"http://127.0.0.1{BASE}/v1/plans")


@pytest.mark.parametrize("asked", [BASE, f"{BASE}/", "/"])
def test_the_first_page_is_there_with_and_without_the_path(under: TestClient, asked: str) -> None:
    """A proxy may take the path off, and health checks ask the service itself."""
    assert f'href="{BASE}/static/pipeplan.css"' in under.get(asked, headers=HTML).text
    assert under.get("/healthz").status_code == under.get(f"{BASE}/healthz").status_code == 200
    assert under.get("/pipeplanner/healthz").status_code == 404
    assert under.get(f"{BASE}{BASE}/healthz").status_code == 404


def test_headers_lead_back_under_the_path(under: TestClient) -> None:
    stored = under.post(f"{BASE}/v1/profiles", json=profile_document())
    assert stored.headers["Location"].startswith(f"{BASE}/v1/profiles/")
    assert under.get(stored.headers["Location"]).status_code == 200
    task = PROFILE_TASK.model_dump(mode="json")
    keyed = [under.post(f"{BASE}/v1/jobs", json=task, headers={"Idempotency-Key": "one"}) for _ in range(2)]
    (location,) = {answer.headers["Location"] for answer in keyed}
    assert location.startswith(f"{BASE}/v1/jobs/")
    page = under.post(location.replace("/v1", "") + "/cancel", headers={"Origin": "http://127.0.0.1"})
    assert (page.status_code, page.headers["Location"]) == (303, location.replace("/v1", ""))
    assert under.get(f"{BASE}/openapi.json").json()["servers"] == [{"url": BASE}]


def test_the_session_belongs_to_the_path_alone(sqlite_url: str, clock: Clock) -> None:
    app = create_app(Settings(database_url=sqlite_url, base_path=BASE, require_tokens=True), now=clock, solve=halve)
    token = made(app.state.context, "plan")
    with TestClient(app, base_url="http://127.0.0.1", follow_redirects=False) as client:
        asked = client.get(f"{BASE}/jobs?state=failed", headers=HTML)
        assert asked.status_code == 401
        assert f'action="{BASE}/login"' in asked.text
        form = {"token": token, "next": "/jobs?state=failed"}
        own = {"Origin": "http://127.0.0.1"}
        opened = client.post(f"{BASE}/login", data=form, headers=own)
        assert opened.headers["Location"] == f"{BASE}/jobs?state=failed"
        assert f"Path={BASE}/" in opened.headers["Set-Cookie"]
        assert client.get(opened.headers["Location"], headers=HTML).status_code == 200
        assert client.get("/jobs", headers=HTML).status_code == 401  # outside of it the cookie is not sent
        ended = client.post(f"{BASE}/logout", headers=own)
        assert ended.headers["Location"] == f"{BASE}/login"
        assert f"Path={BASE}/" in ended.headers["Set-Cookie"]


@pytest.mark.each_case
def test_clients_take_the_path_with_the_address(tmp_path: Path) -> None:
    with served(tmp_path / "service.sqlite3", PIPEPLAN_BASE_PATH=f"{BASE}/") as url:
        assert url.endswith(BASE)
        with Client(url) as client:
            job = client.enqueue_job(PROFILE_TASK)
            client.cancel_job(job.id)
            assert [event.kind for event in client.follow_job(job.id)] == ["queued", "cancelled"]
            assert [one.id for one in client.jobs()] == [job.id]


@pytest.mark.parametrize("wrong", ["pipeplan", "/pipe plan", "//host", "/a/../b", "/a?b", "https://host/a", "/a%2fb"])
def test_what_is_no_path_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_settings(base_path=wrong)
    assert caught.value.field == "base_path"
