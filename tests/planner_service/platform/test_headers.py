"""What every answer tells a browser: of the API, of pages, of files, and of whatever was refused."""

from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import product

import pytest
from fastapi.testclient import TestClient

from planner_service.platform.context import Context
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import store_plan
from tests.planner_service.guarded import context_of, guarding
from tests.planner_service.tokens import bearer, made

PAGE = {"Accept": "text/html"}


@pytest.fixture
def guarded(database_url: str, clock: Clock) -> Iterator[TestClient]:
    """A service that demands tokens."""
    with guarding(database_url, clock, requests_per_s=1000) as client:
        yield client


def policy(text: str) -> dict[str, list[str]]:
    """A content security policy by directive."""
    parts = [part.split() for part in text.split(";")]
    return {part[0]: part[1:] for part in parts if part}


def test_every_answer_has_the_headers_whoever_gives_it(guarded: TestClient) -> None:
    reader = bearer(made(context_of(guarded), "read"))
    answers = [
        guarded.get("/healthz"),
        guarded.get("/login"),
        guarded.get("/static/pipeplan.css"),
        guarded.get("/v1/plans"),
        guarded.get("/v1/plans", headers=reader),
        guarded.get("/v1/nothing", headers=reader),
        guarded.get("/", headers=reader | PAGE),
        guarded.get("/plans/x", headers=reader | PAGE),
        guarded.post("/v1/plans", headers=reader),
        guarded.delete("/v1/plans", headers=reader),
        guarded.get("/v1/plans?" + "x" * 9000),
        guarded.get("/v1/plans", headers={"Origin": "http://evil.example"}),
        guarded.get("/openapi.json", headers=reader),
    ]
    for answer in answers:
        headers = answer.headers
        assert headers["X-Content-Type-Options"] == "nosniff", answer.url
        assert headers["X-Frame-Options"] == "DENY"
        page = headers.get("Content-Type", "").startswith("text/html")
        assert headers["Referrer-Policy"] == ("same-origin" if page else "no-referrer")
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        rules = policy(headers["Content-Security-Policy"])
        assert rules["default-src"] == ["'none'"]
        assert rules["frame-ancestors"] == ["'none'"]
        assert rules["base-uri"] == ["'none'"]
        assert not {"'unsafe-inline'", "'unsafe-eval'", "*", "data:"} & set(rules.get("script-src", []))
        assert not {"'unsafe-inline'", "*"} & set(rules.get("style-src", []))
        assert len(headers.get_list("content-security-policy")) == 1
        assert "server" not in headers


def test_the_login_page_lets_its_form_say_where_it_comes_from(guarded: TestClient) -> None:
    """Under no-referrer browsers send a form with `Origin: null`, which nobody is logged in from."""
    for path in ("/login", "/plans"):
        assert guarded.get(path, headers=PAGE).headers["Referrer-Policy"] == "same-origin"


def test_only_what_never_changes_or_has_a_tag_is_kept(guarded: TestClient) -> None:
    context = context_of(guarded)
    reader = bearer(made(context, "read"))
    plan_id = store_plan(context)
    for path in ("/v1/plans", "/v1/tokens/self", "/login", "/healthz", f"/plans/{plan_id}", "/v1/plans/none"):
        assert "no-store" in guarded.get(path, headers=reader).headers["Cache-Control"], path
    kept = guarded.get(f"/v1/plans/{plan_id}", headers=reader)
    assert "private" in kept.headers["Cache-Control"]
    assert "ETag" in kept.headers
    assert "no-store" in guarded.get(f"/v1/plans/{plan_id}").headers["Cache-Control"]


def test_a_new_token_is_kept_nowhere(guarded: TestClient) -> None:
    admin = bearer(made(context_of(guarded), "admin"))
    answer = guarded.post("/v1/tokens", headers=admin, json={"name": "ci", "scopes": ["read"]})
    assert answer.headers["Cache-Control"] == "no-store"


class Loaded(HTMLParser):
    """What a page would load, run or send."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.inline: list[str] = []
        self.actions: list[str] = []
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes it."""
        given = dict(attrs)
        named = given.get("src") or (given.get("href") if tag == "link" else None)
        if named:
            self.sources.append(named)
        if tag == "form":
            self.actions.append(given.get("action") or "/")
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        self._inside = tag

    def handle_data(self, data: str) -> None:
        """What stands in a script or a style of the page itself."""
        if self._inside in ("script", "style") and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        """Outside again."""
        self._inside = None


def test_the_pages_need_nothing_that_their_policy_forbids(http: TestClient, context: Context) -> None:
    plan_id = store_plan(context)
    pages = ("/", "/login", "/plans", f"/plans/{plan_id}", "/runs", "/jobs", "/profiles", "/clusters", "/nothing")
    for path in pages:
        answer = http.get(path, headers=PAGE)
        assert answer.headers["content-type"].startswith("text/html"), path
        rules = policy(answer.headers["Content-Security-Policy"])
        loaded = Loaded()
        loaded.feed(answer.text)
        assert loaded.sources
        assert all(source.startswith(("/", "data:image/")) and not source.startswith("//") for source in loaded.sources)
        assert loaded.inline == [], path
        assert all(action.startswith("/") and not action.startswith("//") for action in loaded.actions)
        assert not loaded.actions or rules["form-action"] == ["'self'"]
        assert rules["style-src"] == ["'self'"]


FOREIGN = ["evil.example", "127.0.0.1.evil.example", "[", "", "0.0.0.0:80", "127.0.0.1@evil", "localhost.evil"]


def test_on_this_machine_no_foreign_name_is_answered(http: TestClient) -> None:
    for host in FOREIGN:
        assert http.get("/v1/plans", headers={"Host": host}).status_code == 403, host
        assert http.get("/healthz", headers={"Host": host}).status_code == 200, "a prober knows no name"


def test_this_machines_names_are_answered(http: TestClient) -> None:
    for host in ("127.0.0.1", "127.0.0.1:8437", "localhost:1", "[::1]:8437", "LOCALHOST"):
        assert http.get("/v1/plans", headers={"Host": host}).status_code == 200, host


def test_beyond_this_machine_the_names_are_those_that_are_set(database_url: str, clock: Clock) -> None:
    with guarding(database_url, clock, host="0.0.0.0", allowed_hosts="plans.example.org, Gpu1") as client:
        for host, status in (("plans.example.org", 401), ("gpu1:8437", 401), ("127.0.0.1", 401), ("evil.example", 403)):
            assert client.get("/v1/plans", headers={"Host": host}).status_code == status
    with guarding(database_url, clock, host="0.0.0.0") as client:
        assert client.get("/healthz", headers={"Host": "whatever.example"}).status_code == 200
        assert client.get("/v1/plans", headers={"Host": "whatever.example"}).status_code == 401


def test_another_sites_page_is_refused_whatever_it_asks(http: TestClient) -> None:
    origins = ("null", "http://evil.example", "http://127.0.0.1:1", "http://[", "x")
    for method, origin in product(("GET", "POST", "PUT", "DELETE", "OPTIONS"), origins):
        answer = http.request(method, "/v1/plans", headers={"Origin": origin})
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_metrics_are_read_by_a_pods_address_with_a_token(database_url: str, clock: Clock) -> None:
    pod = {"Host": "10.1.2.3:8437"}
    with guarding(database_url, clock, host="0.0.0.0", allowed_hosts="plans.example.org") as client:
        token = made(context_of(client), "read")
        assert client.get("/metrics", headers=pod | bearer(token)).status_code == 200
        assert client.get("/metrics", headers=pod).status_code == 401
        assert (
            client.get("/metrics", headers=pod | bearer(token) | {"Origin": "http://evil.example"}).status_code == 403
        )
        assert client.get("/v1/plans", headers=pod | bearer(token)).status_code == 403


def test_on_this_machine_metrics_are_not_read_under_a_foreign_name(http: TestClient) -> None:
    assert http.get("/metrics", headers={"Host": "10.1.2.3:8437"}).status_code == 403
