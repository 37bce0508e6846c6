"""Login: a session in a cookie that no script reads and no other site sends, over when it is said to be."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.datastructures import Headers

from planner_service.access import service as tokens
from planner_service.access.auth import session_text
from planner_service.access.routes import own_path
from planner_service.access.service import SESSION_S
from tests.planner_service.conftest import Clock
from tests.planner_service.guarded import ORIGIN, context_of, guarding
from tests.planner_service.tokens import bearer, made

COOKIE = "pipeplan_session"
OWN = {"Origin": ORIGIN}
BROWSER = {"Accept": "text/html,application/xhtml+xml"}


@pytest.fixture
def guarded(database_url: str, clock: Clock) -> Iterator[TestClient]:
    """A service that demands tokens."""
    with guarding(database_url, clock) as client:
        yield client


def login(client: TestClient, token: str, way_back: str = "/") -> Any:
    """What the login page sends."""
    return client.post("/login", data={"token": token, "next": way_back}, headers=OWN)


def test_a_browser_without_a_session_is_shown_where_to_log_in_and_led_back(guarded: TestClient) -> None:
    shown = guarded.get("/plans?planner=gpipe", headers=BROWSER)
    assert shown.status_code == 401
    assert 'action="/login"' in shown.text
    assert 'value="/plans?planner=gpipe"' in shown.text
    answer = login(guarded, made(context_of(guarded), "read"), "/plans?planner=gpipe")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/plans?planner=gpipe")
    assert guarded.get("/plans", headers=BROWSER).status_code == 200


def test_the_cookie_is_not_the_token_and_is_kept_from_scripts_and_other_sites(guarded: TestClient) -> None:
    token = made(context_of(guarded), "read")
    cookie = login(guarded, token).headers["Set-Cookie"]
    parts = {part.strip().partition("=")[0].lower(): part for part in cookie.split(";")}
    assert {"httponly", "samesite", "path", "max-age"} <= set(parts)
    assert parts["samesite"].strip().lower() == "samesite=strict"
    assert parts["max-age"].strip().lower() == f"max-age={SESSION_S}"
    assert token.split("_")[2] not in cookie
    secret = guarded.cookies[COOKIE].split("_")[2]
    context = context_of(guarded)
    with context.database.read() as connection:
        kept = connection.exec_driver_sql("SELECT * FROM sessions").all()
    assert len(kept) == 1
    assert secret not in repr(kept)


def test_over_https_the_cookie_is_never_sent_in_the_clear(guarded: TestClient) -> None:
    guarded.base_url = "https://127.0.0.1"
    answer = guarded.post(
        "/login", data={"token": made(context_of(guarded), "read")}, headers={"Origin": "https://127.0.0.1"}
    )
    assert "; secure" in answer.headers["Set-Cookie"].lower()
    assert answer.headers["Strict-Transport-Security"].startswith("max-age=")


@pytest.mark.each_case
@pytest.mark.parametrize("scopes", [("read",), ("plan",), ("admin",)])
def test_a_session_may_what_its_token_may(guarded: TestClient, scopes: tuple[str, ...]) -> None:
    login(guarded, made(context_of(guarded), *scopes))  # type: ignore[arg-type]
    assert guarded.get("/v1/plans").status_code == 200
    assert guarded.post("/v1/profiles", json={}, headers=OWN).status_code == (403 if scopes == ("read",) else 422)
    assert guarded.get("/v1/tokens").status_code == (200 if scopes == ("admin",) else 403)


@pytest.mark.each_case
@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1.evil.example", "http://["])
def test_what_another_sites_page_sends_with_the_cookie_changes_nothing(guarded: TestClient, origin: str | None) -> None:
    login(guarded, made(context_of(guarded), "admin"))
    headers = {} if origin is None else {"Origin": origin}
    for path in ("/v1/tokens", "/v1/tokens/x/revoke", "/logout", "/v1/jobs/x/cancel"):
        assert guarded.post(path, headers=headers).status_code == 403
    assert guarded.delete("/v1/aliases/x", headers=headers).status_code == 403
    assert guarded.get("/v1/plans").status_code == 200


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example"])
def test_nobody_is_logged_in_from_another_sites_page(guarded: TestClient, origin: str | None) -> None:
    headers = {} if origin is None else {"Origin": origin}
    answer = guarded.post("/login", data={"token": made(context_of(guarded), "read")}, headers=headers)
    assert answer.status_code == 403
    assert "Set-Cookie" not in answer.headers


def test_a_wrong_token_is_told_and_not_repeated(guarded: TestClient) -> None:
    answer = login(guarded, "ppl_not-a-token")
    assert answer.status_code == 401
    assert "not valid" in answer.text
    assert "ppl_not-a-token" not in answer.text
    assert "Set-Cookie" not in answer.headers


def test_a_token_without_read_opens_no_session(guarded: TestClient) -> None:
    answer = login(guarded, made(context_of(guarded), "agent"))
    assert answer.status_code == 403
    assert "Set-Cookie" not in answer.headers


def test_a_cookie_is_no_token_and_a_token_no_cookie(guarded: TestClient) -> None:
    token = made(context_of(guarded), "read")
    login(guarded, token)
    cookie = guarded.cookies[COOKIE]
    guarded.cookies.clear()
    assert guarded.get("/v1/plans", headers=bearer(cookie)).status_code == 401
    assert guarded.get("/v1/plans", headers={"Cookie": f"{COOKIE}={token}"}).status_code == 401


def test_after_logout_the_cookie_is_worth_nothing(guarded: TestClient) -> None:
    login(guarded, made(context_of(guarded), "read"))
    cookie = guarded.cookies[COOKIE]
    answer = guarded.post("/logout", headers=OWN)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/login")
    assert COOKIE not in guarded.cookies
    assert guarded.get("/v1/plans", headers={"Cookie": f"{COOKIE}={cookie}"}).status_code == 401


def test_a_session_ends_by_itself_and_with_its_token(guarded: TestClient, clock: Clock) -> None:
    context = context_of(guarded)
    login(guarded, made(context, "read", expires_in_s=None))
    clock.advance(SESSION_S - 1)
    assert guarded.get("/v1/plans").status_code == 200
    clock.advance(1)
    assert guarded.get("/v1/plans").status_code == 401
    guarded.cookies.clear()
    login(guarded, made(context, "read", expires_in_s=60))
    clock.advance(60)
    assert guarded.get("/v1/plans").status_code == 401
    guarded.cookies.clear()
    token = made(context, "read")
    login(guarded, token)
    assert guarded.get("/v1/plans").status_code == 200
    tokens.revoke(context, token.split("_")[1])
    clock.advance(2)
    assert guarded.get("/v1/plans").status_code == 401


def test_a_cookie_that_is_over_is_taken_back(guarded: TestClient, clock: Clock) -> None:
    login(guarded, made(context_of(guarded), "read"))
    clock.advance(SESSION_S)
    answer = guarded.get("/", headers=BROWSER)
    assert answer.status_code == 401
    assert "max-age=0" in answer.headers["Set-Cookie"].lower()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "https://evil.example",
        "//evil.example",
        "/\\evil.example",
        "javascript:alert(1)",
        "/a\nb",
        "plans",
        "\\\\evil",
    ],
)
def test_an_address_of_another_site_is_no_way_back(text: str) -> None:
    assert own_path(text) == "/"


def test_login_leads_to_this_service_alone(guarded: TestClient) -> None:
    text = "https://evil.example"
    assert login(guarded, made(context_of(guarded), "read"), text).headers["Location"] == "/"


def test_what_leads_back_is_no_markup(guarded: TestClient) -> None:
    shown = guarded.get('/login?next=/"><script>alert(1)</script>', headers=BROWSER)
    assert "<script>alert" not in shown.text
    shown = guarded.get('/runs/"><script>alert(1)</script>', headers=BROWSER)
    assert "<script>alert" not in shown.text


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"token=" + b"x" * 9000, "application/x-www-form-urlencoded", 413),
        (b"token=x", "text/plain", 415),
        (b'{"token": "x"}', "application/json", 415),
        (b"&".join([b"a=1"] * 65), "application/x-www-form-urlencoded", 422),
        (b"\xff\xfe", "application/x-www-form-urlencoded", 422),
        (b"", "application/x-www-form-urlencoded", 401),
    ],
)
def test_a_form_that_is_none_is_refused(guarded: TestClient, content: bytes, kind: str, status: int) -> None:
    answer = guarded.post("/login", content=content, headers=OWN | {"Content-Type": kind})
    assert answer.status_code == status


def test_where_no_token_is_demanded_an_old_cookie_hinders_nobody(http: TestClient) -> None:
    assert http.get("/v1/plans", headers={"Cookie": f"{COOKIE}=pps_old"}).status_code == 200


@pytest.mark.parametrize(
    ("cookies", "found"),
    [
        ("pipeplan_session=a", "a"),
        ("x=1; pipeplan_session=a; y=2", "a"),
        (r'x="' + r"\"" * 8_000 + '"; pipeplan_session=a', "a"),
        (";;=;pipeplan_session = a ", "a"),
        ("", None),
        ("x=pipeplan_session", None),
    ],
)
def test_a_session_is_found_among_other_cookies_which_are_not_looked_into(cookies: str, found: str | None) -> None:
    """The standard library takes quadratic time to unquote them, on the event loop."""
    assert session_text(Headers({"cookie": cookies})) == found
