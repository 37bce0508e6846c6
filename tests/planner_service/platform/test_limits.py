"""Limits: how often, how large, how slowly."""

import asyncio
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from pipeplan.errors import TooManyRequestsError
from pipeplan.protocol.tokens import new_credential
from planner_service.platform.middleware import MAX_CALLERS, Rates, RequestLimits, caller_address
from tests.planner_service.conftest import Clock
from tests.planner_service.guarded import context_of, guarding
from tests.planner_service.tokens import bearer, made


class Seconds:
    """A clock that counts seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Seconds so far."""
        return self.now_s


@pytest.fixture
def guarded(database_url: str, clock: Clock) -> Iterator[TestClient]:
    """A service that demands tokens."""
    with guarding(database_url, clock, failed_tokens_per_min=5) as client:
        yield client


def test_a_bucket_holds_a_burst_and_is_filled_evenly() -> None:
    seconds = Seconds()
    rates = Rates(2.0, 3.0, now_s=seconds)
    for _ in range(3):
        rates.require("a", "too many")
        rates.take("a")
    with pytest.raises(TooManyRequestsError) as caught:
        rates.require("a", "too many")
    assert caught.value.retry_after_s == 0.5
    rates.require("b", "too many")
    seconds.now_s = 0.5
    rates.require("a", "too many")
    seconds.now_s = 1e9
    assert rates.wait_s("a") == 0
    for _ in range(3):
        rates.take("a")
    assert rates.wait_s("a") == 0.5


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing() -> None:
    seconds = Seconds()
    seconds.now_s = 100.0
    rates = Rates(1.0, 1.0, now_s=seconds)
    rates.take("a")
    seconds.now_s = 50.0
    assert rates.wait_s("a") == 1.0


def test_callers_without_number_fill_no_memory() -> None:
    rates = Rates(1.0, 1.0, now_s=Seconds())
    for caller in range(MAX_CALLERS + 100):
        rates.take(str(caller))
    assert rates.wait_s("0") == 0
    assert rates.wait_s(str(MAX_CALLERS)) == 1.0


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("testclient", 1), "testclient"),
        (None, "unknown"),
    ],
)
def test_an_address_is_one_caller_and_so_is_a_network_of_ipv6(client: object, expected: str) -> None:
    assert caller_address({"type": "http", "client": client}) == expected


def test_a_token_that_asks_too_often_is_told_when_to_come_back(database_url: str, clock: Clock) -> None:
    with guarding(database_url, clock, requests_per_s=0.001) as client:
        one, other = (bearer(made(context_of(client), "read")) for _ in range(2))
        assert client.get("/v1/plans", headers=one).status_code == 200
        answer = client.get("/v1/plans", headers=one)
        assert (answer.status_code, answer.json()["type"]) == (429, "urn:pipeplan:problem:too-many-requests")
        assert 990 <= int(answer.headers["Retry-After"]) <= 1000
        assert client.get("/v1/plans", headers=other).status_code == 200
        assert client.get("/healthz").status_code == 200


def test_without_tokens_an_address_is_the_caller(database_url: str, clock: Clock) -> None:
    with guarding(database_url, clock, require_tokens=False, requests_per_s=0.001) as client:
        assert client.get("/v1/plans").status_code == 200
        assert client.get("/v1/plans").status_code == 429


def test_an_address_that_sends_wrong_tokens_has_to_wait_and_its_guesses_reach_no_database(guarded: TestClient) -> None:
    statuses = [guarded.get("/v1/plans", headers=bearer(new_credential("ppl").text())).status_code for _ in range(8)]
    assert statuses == [401] * 5 + [429] * 3
    answer = guarded.get("/v1/plans", headers=bearer("x"))
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["Retry-After"]) <= 12
    unseen = guarded.get("/v1/plans", headers=bearer(made(context_of(guarded), "read")))
    assert unseen.status_code == 429


def test_who_is_known_goes_on_while_its_address_has_to_wait(guarded: TestClient, clock: Clock) -> None:
    known = bearer(made(context_of(guarded), "read"))
    assert guarded.get("/v1/plans", headers=known).status_code == 200
    for _ in range(8):
        guarded.get("/v1/plans", headers=bearer("x"))
    clock.advance(3)
    assert guarded.get("/v1/plans", headers=known).status_code == 200
    wrong = known["Authorization"].split("_")[1]
    guess = type(new_credential("ppl"))(prefix="ppl", id=wrong, secret="0" * 64).text()
    assert guarded.get("/v1/plans", headers=bearer(guess)).status_code == 429


def test_wrong_logins_and_wrong_sessions_count_as_wrong_tokens(guarded: TestClient) -> None:
    own = {"Origin": "http://127.0.0.1"}
    statuses = [guarded.post("/login", data={"token": "x"}, headers=own).status_code for _ in range(6)]
    assert statuses == [401] * 5 + [429]
    cookie = {"Cookie": f"pipeplan_session={new_credential('pps').text()}"}
    assert guarded.get("/v1/plans", headers=cookie).status_code == 429


def test_requests_without_any_token_are_no_guesses(guarded: TestClient) -> None:
    assert {guarded.get("/v1/plans").status_code for _ in range(20)} == {401}
    assert guarded.get("/v1/plans", headers=bearer(made(context_of(guarded), "read"))).status_code == 200


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/plans?" + "x" * 9000, {}, 414),
        ("/v1/" + "x" * 9000, {}, 414),
        ("/v1/plans", {"X-Large": "x" * 33_000}, 431),
        ("/v1/plans", {f"X-{number}": "x" for number in range(120)}, 431),
        ("/v1/plans?" + "&".join(["a=1"] * 101), {}, 422),
        ("/v1/plans?cursor=" + "&" * 101, {}, 422),
        ("/static/pipeplan.css?" + "x" * 9000, {}, 414),
    ],
)
def test_a_head_that_nobody_needs_is_refused_before_the_token_is_looked_at(
    guarded: TestClient, path: str, headers: dict[str, str], status: int
) -> None:
    answer = guarded.get(path, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")


def test_a_body_beyond_the_limit_is_refused_whether_it_says_so_or_not(guarded: TestClient) -> None:
    headers = bearer(made(context_of(guarded), "plan")) | {"Content-Type": "application/json"}
    guarded.app.state.max_body_bytes = 2048  # type: ignore[attr-defined]
    assert guarded.post("/v1/profiles", headers=headers, content=b" " * 4096).status_code == 413
    chunks = (b" " * 1024 for _ in range(4))
    assert guarded.post("/v1/profiles", headers=headers, content=chunks).status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    heard: list[Message] = []

    async def application(_scope: Scope, receive: Receive, _send: Send) -> None:
        heard.append(await receive())
        heard.append(await receive())

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(_message: Message) -> None:
        raise AssertionError

    address = {"path": "/", "raw_path": b"/", "query_string": b""}
    scope: Scope = {"type": "http", "headers": [(b"content-length", b"5")], **address}
    asyncio.run(RequestLimits(application, body_timeout_s=0.0)(scope, never, send))
    assert heard == [{"type": "http.disconnect"}] * 2
