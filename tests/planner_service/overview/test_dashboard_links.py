"""Every page that can be gone to: it is there, it is whole, it holds nothing that runs, whatever the names are."""

import re
from urllib.parse import parse_qsl, urldefrag, urlsplit

import pytest
from fastapi.testclient import TestClient

from planner_service.platform.context import Context
from tests.planner_service.dashboard_content import NAMES, filled
from tests.planner_service.html_pages import Page, internal

HTML = {"Accept": "text/html"}
MOST_PAGES = 600
AXES = ("across", "down")
RUNS_SOMETHING = ("style", "srcdoc", "onerror", "onload", "onclick")


def _read(http: TestClient, address: str) -> Page | None:
    """The page at an address; None where something else than a page is."""
    answer = http.get(address, headers=HTML)
    assert answer.status_code == 200, (address, answer.text[:500])
    return Page(answer.text) if answer.headers["content-type"].startswith("text/html") else None


def _walked(http: TestClient, start: str) -> dict[str, Page | None]:
    """All that can be gone to from a page, by address; of the maps of a search one."""
    seen: dict[str, Page | None] = {}
    mapped: set[tuple[str, tuple[str, ...]]] = set()
    ahead = [start]
    while ahead:
        address = ahead.pop()
        parts = urlsplit(address)
        place = parts.path, tuple(key for key, _ in parse_qsl(parts.query) if key in AXES)
        if address in seen or (place[1] and place in mapped):
            continue
        mapped.add(place)
        assert len(seen) < MOST_PAGES
        seen[address] = page = _read(http, address)
        if page is not None:
            ahead += [urldefrag(link).url for link in (*page.links, *page.loaded) if internal(link) and link[0] != "#"]
    return seen


@pytest.mark.each_case
def test_every_link_leads_to_a_page_that_is_whole_and_runs_no_name(http: TestClient, context: Context) -> None:
    filled(context)
    pages = {address: page for address, page in _walked(http, "/").items() if page is not None}
    _require_whole(pages)
    _require_that_nothing_runs(pages)


def _require_whole(pages: dict[str, Page]) -> None:
    kinds = {address.split("?")[0].split("/")[1] for address in pages}
    assert kinds == {"", "plans", "aliases", "profiles", "clusters", "runs", "jobs", "agents", "compare", "audit"}
    for address, page in pages.items():
        assert page.counted == {"main": 1, "h1": 1}, address
        assert not page.unlabelled, (address, page.unlabelled)
        assert len(page.ids) == len(set(page.ids)), address
        assert all(internal(link) for link in (*page.links, *page.loaded)), address
        for form in page.forms:
            assert internal(form.action)
            assert form.method in ("get", "post")


def _require_that_nothing_runs(pages: dict[str, Page]) -> None:
    """No name has become a tag, an attribute or a script."""
    names = {name for page in pages.values() for _, name, _ in page.attributes}
    assert not names & set(RUNS_SOMETHING)
    for address, page in pages.items():
        tags = {(tag, value) for tag, name, value in page.attributes if name == "src"}
        scripts = {("script", f"/static/{name}.js") for name in ("live", "timeline", "charts")}
        drawn = re.compile(r"/charts/(schedule|timeline)\.svg\?batches=")
        pictures = {(tag, value) for tag, value in tags if tag == "img" and drawn.search(value)}
        assert tags - pictures <= {("img", "/static/icon.svg"), *scripts}, address
        assert "49" not in [word.strip() for word in page.words if "7 * 7" in word], address
        assert max(len(word) for word in page.words) <= 4100, address
    assert any(NAMES[0] in page.text for page in pages.values())


def test_pages_without_anything_stored_say_what_to_do(http: TestClient) -> None:
    walked = _walked(http, "/")
    for address in ("/", "/plans", "/aliases", "/profiles", "/clusters", "/runs", "/jobs", "/agents"):
        page = walked[address]
        assert page is not None
        assert " yet." in page.text
        assert "pipeplan" in page.text
