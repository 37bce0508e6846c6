"""Tokens: shown once, kept as a keyed hash, scoped, expiring, revocable, and their last use told."""

import json
import re
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, select, update

from pipeplan.documents.files import parse
from pipeplan.errors import ConflictError, InvalidInputError, NotFoundError, PipeplanError
from pipeplan.protocol.tokens import NewToken, parse_credential
from planner_service.access import service as tokens
from planner_service.access.service import token_key
from planner_service.app import create_app
from planner_service.platform import tables
from planner_service.platform.context import Context
from planner_service.platform.migrations import upgrade
from planner_service.platform.settings import Settings, load_settings
from tests.planner_service.answers import halve
from tests.planner_service.conftest import Clock
from tests.planner_service.tokens import bearer, made

KNOWN_FOR_S = 2.0
"""What docs/security.md says of how long a process goes by what it has read."""


def self_status(http: TestClient, token: str) -> int:
    """What a token is told of itself."""
    return http.get("/v1/tokens/self", headers=bearer(token)).status_code


def test_a_token_is_shown_once_and_kept_as_a_keyed_hash(http: TestClient, context: Context) -> None:
    answer = http.post("/v1/tokens", json={"name": "ci", "scopes": ["plan"], "expires_in_s": 60})
    assert answer.status_code == 201
    text = answer.json()["token"]
    assert re.fullmatch(r"ppl_[0-9a-f]{32}_[0-9a-f]{72}", text)
    credential = parse_credential("ppl", text)
    assert credential is not None
    with context.database.read() as connection:
        row = connection.execute(select(tables.tokens)).one()
    assert row.secret_hash == token_key(context).hash(credential.secret)
    assert credential.secret not in repr(tuple(row))
    for told in (http.get("/v1/tokens"), http.get(answer.headers["Location"])):
        assert credential.secret not in told.text
        assert row.secret_hash not in told.text


def test_a_token_without_a_life_named_lives_90_days(http: TestClient, clock: Clock) -> None:
    answer = http.post("/v1/tokens", json={"name": "ci", "scopes": ["read"]}).json()
    assert answer["expires_at"] == (clock() + timedelta(days=90)).isoformat().replace("+00:00", "Z")


WRONG_TOKENS: tuple[dict[str, object], ...] = (
    {"name": "ci\nadmin", "scopes": ["read"]},
    {"name": "", "scopes": ["read"]},
    {"name": "x" * 101, "scopes": ["read"]},
    {"name": "local", "scopes": ["read"]},
    {"name": "ci", "scopes": []},
    {"name": "ci", "scopes": ["root"]},
    {"name": "ci", "scopes": ["read"], "expires_in_s": 0},
    {"name": "ci", "scopes": ["read"], "expires_in_s": 10**12},
    {"name": "ci", "scopes": ["read"], "secret_hash": "0" * 64},
)


def test_what_is_no_token_to_be_made_is_refused(http: TestClient) -> None:
    for wrong in WRONG_TOKENS:
        assert http.post("/v1/tokens", json=wrong).status_code == 422, wrong


def test_one_wrong_digit_anywhere_is_refused(http: TestClient, context: Context) -> None:
    text = made(context, "read")
    assert self_status(http, text) == 200
    for position in range(0, len(text), 7):
        digit = "0" if text[position] != "0" else "1"
        assert self_status(http, text[:position] + digit + text[position + 1 :]) in (401, 429)


def test_a_secret_of_another_token_is_refused(http: TestClient, context: Context) -> None:
    one, other = (parse_credential("ppl", made(context, "read")) for _ in range(2))
    assert one is not None and other is not None
    mixed = type(one)(prefix="ppl", id=one.id, secret=other.secret)
    assert self_status(http, mixed.text()) == 401


WRONG_HEADERS = ["", "Bearer", "Bearer ", "Basic YTpi", "bearer x y", "Bearer ppl_", "Bearer é", "x" * 9000]


def test_what_is_no_bearer_token_is_refused_even_on_this_machine(http: TestClient) -> None:
    for header in WRONG_HEADERS:
        answer = http.get("/v1/plans", headers={b"Authorization": header.encode()})
        assert answer.status_code == 401, header
        assert answer.headers["WWW-Authenticate"] == 'Bearer realm="pipeplan"'
        assert answer.json()["type"] == "urn:pipeplan:problem:unauthorized"


def test_two_authorization_headers_are_refused(http: TestClient, context: Context) -> None:
    given = [("Authorization", f"Bearer {made(context, 'read')}")] * 2
    assert http.get("/v1/plans", headers=given).status_code == 401


def test_a_token_expires_to_the_second(http: TestClient, context: Context, clock: Clock) -> None:
    text = made(context, "read", expires_in_s=60)
    clock.advance(59)
    assert self_status(http, text) == 200
    clock.advance(1)
    assert self_status(http, text) == 401


def test_a_revoked_token_is_refused_at_once_by_the_process_that_revoked_it(http: TestClient, context: Context) -> None:
    text = made(context, "read")
    assert self_status(http, text) == 200
    identity = http.get("/v1/tokens/self", headers=bearer(text)).json()["token"]["id"]
    assert http.post(f"/v1/tokens/{identity}/revoke").json()["state"] == "revoked"
    assert self_status(http, text) == 401
    assert http.post(f"/v1/tokens/{identity}/revoke").status_code == 200


def test_a_token_revoked_elsewhere_is_refused_within_the_time_stated(
    http: TestClient, context: Context, clock: Clock
) -> None:
    text = made(context, "read")
    assert self_status(http, text) == 200
    tokens.revoke(context, text.split("_")[1])
    clock.advance(KNOWN_FOR_S)
    assert self_status(http, text) == 401


def test_many_requests_with_one_token_read_the_database_once(http: TestClient, context: Context, clock: Clock) -> None:
    text = made(context, "read")
    assert http.get("/openapi.json", headers=bearer(text)).status_code == 200
    statements: list[str] = []
    event.listen(context.database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    clock.advance(KNOWN_FOR_S)
    for _ in range(50):
        assert http.get("/openapi.json", headers=bearer(text)).status_code == 200
    assert len([one for one in statements if "tokens" in one]) == 1


def test_the_last_use_is_noted_at_most_once_a_minute(http: TestClient, context: Context, clock: Clock) -> None:
    text = made(context, "read")
    token_id = text.split("_")[1]
    assert tokens.get(context, token_id).last_used_at is None
    first = clock()
    assert self_status(http, text) == 200
    assert tokens.get(context, token_id).last_used_at == first
    clock.advance(59)
    assert self_status(http, text) == 200
    assert tokens.get(context, token_id).last_used_at == first
    clock.advance(1)
    assert self_status(http, text) == 200
    assert tokens.get(context, token_id).last_used_at == clock()


def test_a_wrong_secret_is_no_use_of_the_token(http: TestClient, context: Context) -> None:
    credential = parse_credential("ppl", made(context, "read"))
    assert credential is not None
    assert self_status(http, type(credential)(prefix="ppl", id=credential.id, secret="0" * 64).text()) == 401
    assert tokens.get(context, credential.id).last_used_at is None


def test_a_caller_is_told_its_name_and_everything_that_its_scopes_include(http: TestClient, context: Context) -> None:
    told = http.get("/v1/tokens/self", headers=bearer(made(context, "plan", name="ci"))).json()
    assert (told["name"], told["scopes"], told["token"]["scopes"]) == ("ci", ["read", "plan"], ["plan"])
    told = http.get("/v1/tokens/self", headers=bearer(made(context, "admin"))).json()
    assert told["scopes"] == ["read", "plan", "agent", "admin"]
    assert http.get("/v1/tokens/self").json() == {
        "name": "local",
        "scopes": ["read", "plan", "agent", "admin"],
        "token": None,
    }


def test_tokens_are_listed_newest_first_a_page_at_a_time(http: TestClient, context: Context) -> None:
    for name in ("a", "b", "c"):
        made(context, "read", name=name)
    first = http.get("/v1/tokens", params={"limit": 2}).json()
    rest = http.get("/v1/tokens", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert [token["name"] for token in first["items"] + rest["items"]] == ["c", "b", "a"]
    assert rest["next_cursor"] is None
    assert first["items"][0]["created_by"] == "test"


def test_a_name_finds_a_token_only_where_one_valid_token_has_it(context: Context, clock: Clock) -> None:
    first = made(context, "read", expires_in_s=60).split("_")[1]
    assert tokens.id_of(context, "ci") == first == tokens.id_of(context, first)
    second = made(context, "read").split("_")[1]
    with pytest.raises(ConflictError, match=f"{second}|{first}"):
        tokens.id_of(context, "ci")
    clock.advance(60)
    assert tokens.id_of(context, "ci") == second
    with pytest.raises(NotFoundError):
        tokens.id_of(context, "nobody")


def test_tokens_made_under_another_key_are_worth_nothing(database_url: str, clock: Clock) -> None:
    texts: dict[str | None, str] = {}
    for key in (None, "k" * 32, "l" * 32):
        with TestClient(
            create_app(Settings(database_url=database_url, token_key=key), now=clock, solve=halve),
            base_url="http://127.0.0.1",
        ) as http:
            for text in texts.values():
                assert self_status(http, text) == 401
            texts[key] = http.post("/v1/tokens", json={"name": "ci", "scopes": ["read"]}).json()["token"]
            assert self_status(http, texts[key]) == 200
            assert sorted(token["state"] for token in http.get("/v1/tokens").json()["items"]) == sorted(
                ["valid", *["foreign"] * (len(texts) - 1)]
            )


def test_processes_on_one_database_agree_on_its_key(context: Context, database_url: str, clock: Clock) -> None:
    text = made(context, "read")
    with TestClient(create_app(Settings(database_url=database_url), now=clock), base_url="http://127.0.0.1") as other:
        assert self_status(other, text) == 200


@pytest.mark.each_case
@pytest.mark.parametrize("beyond", [{"host": "0.0.0.0"}, {"host": "::"}, {"allowed_hosts": ("plans.example.org",)}])
def test_the_service_does_not_start_where_others_reach_it_before_there_is_a_valid_token(
    database_url: str, clock: Clock, beyond: dict[str, object]
) -> None:
    settings = Settings(database_url=database_url, **beyond)  # type: ignore[arg-type]
    app = create_app(settings, now=clock, solve=halve)
    context: Context = app.state.context
    upgrade(context.database)
    expired = made(context, "admin", expires_in_s=1)
    tokens.revoke(context, made(context, "admin").split("_")[1])
    clock.advance(1)
    with pytest.raises(PipeplanError, match="pipeplan token create --name admin --scope admin"), TestClient(app):
        pass
    again = create_app(settings, now=clock, solve=halve)
    text = made(again.state.context, "admin")
    with TestClient(again, base_url="http://127.0.0.1") as http:
        assert http.get("/v1/plans").status_code == 401
        assert self_status(http, expired) == 401
        assert self_status(http, text) == 200


def test_tokens_are_demanded_wherever_others_can_ask() -> None:
    assert not load_settings(host="127.0.0.1").demands_tokens
    assert not load_settings(host="::1", allowed_hosts="localhost").demands_tokens
    assert load_settings(host="127.0.0.1", require_tokens=True).demands_tokens
    assert load_settings(host="127.0.0.1", allowed_hosts="plans.example.org").demands_tokens
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.com", "127.0.0.1.example.com"):
        assert load_settings(host=host).demands_tokens


def test_a_short_key_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_settings(token_key="hunter2")
    assert "hunter2" not in str(caught.value)
    assert "k" * 32 not in repr(load_settings(token_key="k" * 32))


def test_a_token_that_was_altered_in_the_database_is_worth_nothing(http: TestClient, context: Context) -> None:
    text = made(context, "read")
    with context.database.write() as connection:
        connection.execute(update(tables.tokens).values(secret_hash="0" * 64))
    assert self_status(http, text) == 401


def test_a_new_tokens_document_says_what_it_is_made_of() -> None:
    assert parse(NewToken, json.dumps({"name": "ci", "scopes": ["plan", "agent"]})).expires_in_s == 90 * 24 * 3600
