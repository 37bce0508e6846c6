"""Whoever is not known gets nowhere: every route there is, mounted or added later, with every kind of token."""

import re
from collections.abc import Iterator

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import RouteContext, iter_route_contexts
from fastapi.staticfiles import StaticFiles
from fastapi.testclient import TestClient
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope
from starlette.websockets import WebSocketDisconnect

from pipeplan.errors import PipeplanError
from pipeplan.protocol.tokens import SCOPES, Scope
from planner_service.access.auth import demands_of, require_scopes
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import profile_document
from tests.planner_service.guarded import context_of, guarding
from tests.planner_service.tokens import bearer, made

PUBLIC = {("GET", "/healthz"), ("GET", "/login"), ("POST", "/login"), ("GET", "/static")}
"""What anybody may ask for."""

AGENTS = re.compile(r"/v1/jobs/(lease|reports|{job_id}/(heartbeat|complete|fail|release|losses|progress))|/v1/agents.*")
"""Where agents write."""

AGENTS_TOO = {
    "/v1/plans/{plan_id}",
    "/v1/aliases/{name:path}",
    "/v1/aliases/{name:path}/plan",
    "/v1/jobs/{job_id}",
    "/v1/agents/{agent_id}",
    "/v1/tokens/self",
    "/readyz",
    "/openapi.json",
}
"""What agents read: what they work on, and whether they can."""

ADMINS = re.compile(r"/v1/tokens(/{token_id}(/revoke)?)?|(/v1)?/audit")

WHO_MAY: dict[Scope, set[Scope]] = {
    "read": {"read", "plan", "admin"},
    "plan": {"plan", "admin"},
    "agent": {"agent", "admin"},
    "admin": {"admin"},
}
"""What a route asks for, and the tokens that pass."""


def expected_callers(method: str, path: str) -> set[Scope]:
    """Whose tokens a route is for, by what it does: the table of scopes."""
    if ADMINS.fullmatch(path):
        return WHO_MAY["admin"]
    if method == "GET":
        return WHO_MAY["read"] | ({"agent"} if path in AGENTS_TOO else set())
    if AGENTS.fullmatch(path):
        return WHO_MAY["agent"]
    return WHO_MAY["read"] if path == "/logout" else WHO_MAY["plan"]


@pytest.fixture
def guarded(database_url: str, clock: Clock) -> Iterator[TestClient]:
    """A service that demands tokens."""
    with guarding(database_url, clock) as client:
        yield client


def routes_of(client: TestClient) -> list[tuple[str, str, RouteContext]]:
    """Every method of every route, and the mounts, which know none."""
    contexts = iter_route_contexts(client.app.routes)  # type: ignore[attr-defined]
    return [(method, route.path or "", route) for route in contexts for method in sorted(route.methods or {"GET"})]


def address(path: str) -> str:
    """An address that the route matches."""
    return re.sub(r"{[^}]*}", "0" * 32, path)


@pytest.mark.each_case
def test_without_a_token_every_route_answers_401_whatever_the_method(guarded: TestClient) -> None:
    walked = [(method, path) for method, path, _ in routes_of(guarded)]
    assert len(walked) > 50
    for method, path in walked:
        if (method, path) in PUBLIC:
            continue
        for asked in {method, "HEAD", "OPTIONS", "GET", "POST", "PUT", "PATCH", "DELETE", "TRACE"}:
            if (asked, path) not in PUBLIC:
                answer = guarded.request(asked, address(path))
                assert answer.status_code == 401, (asked, path, answer.status_code)
                assert "WWW-Authenticate" in answer.headers


@pytest.mark.each_case
@pytest.mark.parametrize(
    "path",
    ["/v1/nothing", "/docs", "/redoc", "/v1", "/v1/plans/", "//v1/plans", "/static", "/healthz/", "/V1/plans", "/%2e"],
)
def test_without_a_token_nobody_learns_what_there_is(guarded: TestClient, path: str) -> None:
    assert guarded.get(path, follow_redirects=False).status_code == 401


def test_what_is_public_is_no_more_than_is_listed(guarded: TestClient) -> None:
    assert guarded.get("/healthz").status_code == 200
    assert guarded.get("/login").status_code == 200
    assert guarded.get("/static/pipeplan.css").status_code == 200
    for path in (
        "/static/../pages.py",
        "/static/%2e%2e/pages.py",
        "/static/..%2fpages.py",
        "/static//etc/passwd",
        "/static/",
    ):
        assert guarded.get(path).status_code in (401, 404), path
    declared = {(method, path) for method, path, route in routes_of(guarded) if not demands_of(route)}
    assert declared == PUBLIC


@pytest.mark.each_case
def test_every_route_lets_in_the_scopes_of_the_table_and_no_others(guarded: TestClient) -> None:
    tokens = {scope: made(context_of(guarded), scope, name=scope) for scope in SCOPES}
    for method, path, _ in routes_of(guarded):
        if (method, path) in PUBLIC:
            continue
        for scope in SCOPES:
            headers = bearer(tokens[scope]) | {"Origin": "http://127.0.0.1"}
            answer = guarded.request(method, address(path), headers=headers, follow_redirects=False)
            passes = answer.status_code not in (401, 403)
            assert passes == (scope in expected_callers(method, path)), (method, path, scope, answer.status_code)


def test_a_caller_without_the_scope_is_refused_before_its_body_is_looked_at(guarded: TestClient) -> None:
    reader = bearer(made(context_of(guarded), "read"))
    answer = guarded.post("/v1/profiles", headers=reader, json={"not": "a profile"})
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:pipeplan:problem:forbidden")
    assert "plan" in answer.json()["detail"]


def test_documents_that_lie_ready_ask_for_the_same_scopes(guarded: TestClient) -> None:
    context = context_of(guarded)
    planner, agent = bearer(made(context, "plan")), bearer(made(context, "agent"))
    location = guarded.post("/v1/profiles", headers=planner, json=profile_document()).headers["Location"]
    for _ in range(2):
        assert guarded.get(location, headers=planner).status_code == 200
    assert guarded.get(location, headers=agent).status_code == 403
    assert guarded.get(location).status_code == 401


async def _mounted(_scope: AsgiScope, _receive: Receive, _send: Send) -> None:
    raise AssertionError


def _on_the_app(app: FastAPI) -> None:
    app.get("/v1/slipped")(lambda: "in")


def _in_a_router(app: FastAPI) -> None:
    router = APIRouter(prefix="/v1")
    router.get("/slipped")(lambda: "in")
    app.include_router(router)


def _in_a_router_in_a_router(app: FastAPI) -> None:
    inner, outer = APIRouter(), APIRouter(prefix="/v1")
    inner.get("/slipped")(lambda: "in")
    outer.include_router(inner)
    app.include_router(outer)


def _on_a_mount(app: FastAPI) -> None:
    app.mount("/v1/slipped", _mounted)


def _of_files(app: FastAPI) -> None:
    app.mount("/v1/slipped", StaticFiles(directory="."))


def _of_the_framework(app: FastAPI) -> None:
    app.add_route("/v1/slipped", lambda _request: None)  # type: ignore[arg-type, return-value]


def _of_a_websocket(app: FastAPI) -> None:
    app.add_api_websocket_route("/v1/slipped", _mounted)


SLIPPING = (
    _on_the_app,
    _in_a_router,
    _in_a_router_in_a_router,
    _on_a_mount,
    _of_files,
    _of_the_framework,
    _of_a_websocket,
)


@pytest.mark.each_case
@pytest.mark.parametrize("slip", SLIPPING)
def test_a_route_that_declares_no_scope_keeps_the_service_from_starting_and_is_closed_anyway(
    guarded: TestClient, slip: object
) -> None:
    assert callable(slip)
    app = guarded.app
    assert isinstance(app, FastAPI)
    require_scopes(app)
    slip(app)
    with pytest.raises(PipeplanError, match="does not declare its scope"):
        require_scopes(app)
    assert guarded.get("/v1/slipped").status_code == 401


def test_no_websocket_is_let_in(guarded: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect), guarded.websocket_connect("/v1/jobs"):
        pass
