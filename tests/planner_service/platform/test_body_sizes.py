"""Every route that reads a body says how large one it takes, and one function alone reads them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from fastapi.testclient import TestClient

import planner_service
from pipeplan.errors import PipeplanError
from planner_service.access.auth import scope
from planner_service.app import create_app
from planner_service.platform.requests import Body, body, limit_of, reads_body, require_sizes, size_of, takes
from planner_service.platform.settings import Settings
from tests.planner_service.answers import halve

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded", "Origin": "http://127.0.0.1"}
KIB = 1024
LIMITS = {
    "POST /login": 8 * KIB,
    "POST /plans/new": 64 * KIB,
    "POST /runs/calibrate": 64 * KIB,
    "POST /v1/agents": 1024 * KIB,
    "POST /v1/agents/{agent_id}/heartbeat": 64 * KIB,
    "POST /v1/clusters": 1024 * KIB,
    "POST /v1/jobs": 4096 * KIB,
    "POST /v1/jobs/lease": 64 * KIB,
    "POST /v1/jobs/{job_id}/complete": 65536 * KIB,
    "POST /v1/jobs/{job_id}/fail": 64 * KIB,
    "POST /v1/jobs/{job_id}/heartbeat": 64 * KIB,
    "POST /v1/jobs/{job_id}/release": 64 * KIB,
    "POST /v1/plans": 4096 * KIB,
    "POST /v1/profiles": 65536 * KIB,
    "POST /v1/tokens": 64 * KIB,
    "PUT /v1/aliases/{name:path}": 64 * KIB,
}
WITHOUT_BODY = {
    "DELETE /v1/aliases/{name:path}",
    "POST /example",
    "POST /jobs/{job_id}/cancel",
    "POST /jobs/{job_id}/retry",
    "POST /logout",
    "POST /v1/jobs/{job_id}/cancel",
    "POST /v1/jobs/{job_id}/retry",
    "POST /v1/tokens/{token_id}/revoke",
}


@pytest.fixture
def roomy(sqlite_url: str) -> FastAPI:
    """The application with the general limit as it is unless somebody sets it."""
    return create_app(Settings(database_url=sqlite_url), solve=halve)


def _writing(app: FastAPI) -> Iterator[tuple[str, RouteContext]]:
    for route in iter_route_contexts(app.routes):
        for method in (route.methods or set()) - {"GET", "HEAD"}:
            yield f"{method} {route.path}", route


def test_every_route_with_a_body_declares_how_large_one_it_takes(roomy: FastAPI) -> None:
    declared = {name: size_of(route) for name, route in _writing(roomy)}
    assert {name: limit_of(roomy, size) for name, size in declared.items() if size is not None} == LIMITS
    assert {name for name, size in declared.items() if size is None} == WITHOUT_BODY
    reading = {name for name, route in _writing(roomy) if reads_body(route)}
    assert reading == set(LIMITS)


def test_a_route_that_does_not_declare_it_keeps_the_service_from_starting(roomy: FastAPI) -> None:
    @roomy.post("/v1/new", dependencies=[scope("plan")])
    def new(content: Body) -> int:
        return len(content)

    with pytest.raises(PipeplanError, match="'/v1/new' does not say how large a body"):
        require_sizes(roomy)


def test_one_function_alone_reads_bodies(roomy: FastAPI) -> None:
    folder = Path(planner_service.__file__).parent
    readers = re.compile(r"request\.(stream|body|json|form)\(")
    found = [path for path in folder.rglob("*.py") if readers.search(path.read_text(encoding="utf-8"))]
    assert [path.relative_to(folder).as_posix() for path in found] == ["platform/requests.py"]
    assert not any(getattr(route, "body_field", None) for _, route in _writing(roomy))


@pytest.mark.each_case
@pytest.mark.parametrize("name", sorted(LIMITS))
@pytest.mark.parametrize("says_so", [True, False])
def test_a_body_beyond_its_routes_limit_is_a_413_that_names_it(roomy: FastAPI, name: str, says_so: bool) -> None:
    limit_bytes = roomy.state.max_body_bytes = min(LIMITS[name], 1024 * KIB)
    method, path = name.replace("{name:path}", "a").split(" ")
    size = limit_bytes + 1
    content = b" " * size if says_so else iter([b" " * (size // 2), b" " * (size - size // 2)])
    with TestClient(roomy, base_url="http://127.0.0.1") as http:
        answer = http.request(method, path, content=content, headers=JSON if path.startswith("/v1/") else FORM)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:pipeplan:problem:too-large")
    assert f"must have at most {limit_bytes} bytes" in answer.json()["detail"]


def test_the_description_names_every_limit(roomy: FastAPI) -> None:
    described = {
        f"{method.upper()} {path}": operation.get("x-max-body-bytes")
        for path, operations in roomy.openapi()["paths"].items()
        for method, operation in operations.items()
        if "requestBody" in operation
    }
    api = {name.replace(":path", ""): limit for name, limit in LIMITS.items() if " /v1/" in name}
    assert described == api
    answers = roomy.openapi()["paths"]["/v1/tokens"]["post"]["responses"]
    assert answers["413"]["description"].startswith("The body has more than 65536 bytes")


@pytest.mark.each_case
@pytest.mark.parametrize("declared", [b"9" * 5000, b"\xb2", b"1e3", b"-1"])
def test_a_length_that_is_no_number_is_no_fault_of_the_service(http: TestClient, declared: bytes) -> None:
    headers = {b"Content-Type": b"application/json", b"Content-Length": declared}
    request = http.build_request("POST", "/v1/tokens", content=b"{}", headers=headers)
    assert http.send(request).status_code in (413, 422)


def test_a_new_route_may_take_what_it_declares() -> None:
    app = FastAPI()

    @app.post("/new", dependencies=[takes(10), Depends(body)])
    def new() -> None: ...

    require_sizes(app)
    (route,) = (one for one in iter_route_contexts(app.routes) if isinstance(one.original_route, APIRoute))
    size = size_of(route)
    assert size is not None
    assert size.most_bytes == 10
