"""What both clients do with a service that is slow, gone or changed: every law is asked of both."""

import asyncio
import inspect
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeplan
from pipeplan.client.client import AsyncClient, Client
from pipeplan.client.exchange import AnswerCache, Received
from pipeplan.client.operations import Operations
from pipeplan.client.reference import written
from pipeplan.errors import (
    ConflictError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    ServiceError,
    TooManyRequestsError,
    UnavailableError,
)
from pipeplan.protocol.jobs import Job
from pipeplan.protocol.plans import Alias, PlanQuery
from planner_service.overview.openapi import PLAN_REQUEST
from tests.planner_service.clients.services import Scripted, Time, asked_of, problem
from tests.planner_service.examples import PROFILE_TASK

BOTH = pytest.mark.parametrize("kind", [Client, AsyncClient])
MOMENT = datetime(2026, 1, 2, tzinfo=UTC)
ALIAS = Alias(name="a", plan_id="0" * 32, version=1, moved_by="local", moved_at=MOMENT, created_at=MOMENT)
FOUND = httpx.Response(200, text=ALIAS.model_dump_json())
LOST = httpx.ReadError("broke")
AWAY = httpx.ConnectError("refused")
BUSY = problem(503, "unavailable", **{"Retry-After": "2"})
BETWEEN = httpx.Response(502, text="<html>bad gateway</html>", headers={"Content-Type": "text/html"})


def public(kind: type) -> dict[str, Any]:
    """What a class offers, by name."""
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


def test_both_clients_have_every_operation_with_its_arguments_and_its_docstring() -> None:
    for kind in (Client, AsyncClient):
        assert set(public(kind)) == {*public(Operations), "close"} - {"exchange"}
        for name in set(public(kind)) - {"close"}:
            method, operation = getattr(kind, name), getattr(Operations, name)
            assert method.__doc__ == operation.__doc__
            assert inspect.signature(method).parameters == inspect.signature(operation).parameters


def test_the_reference_is_todays() -> None:
    page = Path(__file__).parents[3] / "docs" / "client.md"
    assert page.read_text(encoding="utf-8") == written(), "python -m pipeplan.client.reference > docs/client.md"


def test_the_clients_are_public_names() -> None:
    assert (pipeplan.Client, pipeplan.AsyncClient) == (Client, AsyncClient)


@BOTH
@pytest.mark.parametrize("trouble", [LOST, AWAY, BETWEEN, BUSY, problem(429, "too-many-requests")])
def test_what_is_read_is_asked_for_again(kind: Any, trouble: httpx.Response | Exception) -> None:
    service, time = Scripted(trouble, trouble, FOUND), Time()
    assert asked_of(kind, service, time)("alias", "a") == ALIAS
    assert len(service.asked) == 3
    assert len(time.slept) == 2
    if trouble is BUSY:
        assert time.slept == [2.0, 2.0], "it comes back when it is asked to"


@BOTH
@pytest.mark.parametrize(
    ("trouble", "error"),
    [(LOST, ServiceError), (BUSY, UnavailableError), (problem(429, "too-many-requests"), TooManyRequestsError)],
)
def test_patience_ends_with_what_came_last(kind: Any, trouble: Any, error: type[Exception]) -> None:
    service, time = Scripted(trouble), Time()
    with pytest.raises(error):
        asked_of(kind, service, time, patience_s=9.0)("alias", "a")
    assert 3 < sum(time.slept) <= 9
    none = Scripted(trouble)
    with pytest.raises(error):
        asked_of(kind, none, time, patience_s=0.0)("alias", "a")
    assert len(none.asked) == 1


@BOTH
def test_who_should_come_back_later_than_patience_lasts_hears_it_at_once(kind: Any) -> None:
    service, time = Scripted(problem(503, "unavailable", **{"Retry-After": "60"})), Time()
    with pytest.raises(UnavailableError) as caught:
        asked_of(kind, service, time)("alias", "a")
    assert (len(service.asked), time.slept, caught.value.retry_after_s) == (1, [], 60.0)


@BOTH
@pytest.mark.parametrize("trouble", [LOST, BETWEEN, BUSY, problem(409, "in-flight", **{"Retry-After": "1"})])
def test_a_post_is_sent_again_under_the_same_key_only(kind: Any, trouble: Any) -> None:
    done = problem(409, "conflict")
    service = Scripted(trouble, trouble, done)
    with pytest.raises(ConflictError):
        asked_of(kind, service, Time())("cancel_job", "j")
    keys = [request.headers["Idempotency-Key"] for request in service.asked]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    other = Scripted(done)
    with pytest.raises(ConflictError):
        asked_of(kind, other, Time())("cancel_job", "j")
    assert other.asked[0].headers["Idempotency-Key"] != keys[0]


@pytest.mark.parametrize("trouble", [LOST, AWAY, BETWEEN, BUSY])
def test_a_post_without_a_key_is_sent_once(trouble: Any) -> None:
    service = Scripted(trouble)
    client = Client("http://127.0.0.1:1", transport=service, clock=Time().clock)
    with pytest.raises(ServiceError):
        client.connection.post("/v1/jobs", "{}")
    assert len(service.asked) == 1


@BOTH
@pytest.mark.parametrize(
    ("name", "arguments", "named", "trouble", "again"),
    [
        ("delete_alias", ("a",), {}, LOST, False),
        ("delete_alias", ("a",), {}, BETWEEN, False),
        ("delete_alias", ("a",), {}, AWAY, True),
        ("delete_alias", ("a",), {}, BUSY, True),
        ("set_alias", ("a", "0" * 32), {}, LOST, True),
        ("set_alias", ("a", "0" * 32), {"if_version": 3}, LOST, False),
        ("set_alias", ("a", "0" * 32), {"if_version": 3}, BETWEEN, False),
        ("set_alias", ("a", "0" * 32), {"only_new": True}, LOST, False),
        ("set_alias", ("a", "0" * 32), {"if_version": 3}, AWAY, True),
        ("set_alias", ("a", "0" * 32), {"if_version": 3}, BUSY, True),
    ],
)
def test_what_may_have_been_done_is_not_done_twice(
    kind: Any, name: str, arguments: tuple[str, ...], named: dict[str, Any], trouble: Any, again: bool
) -> None:
    service = Scripted(trouble, FOUND)
    ask = asked_of(kind, service, Time())
    if again:
        ask(name, *arguments, **named)
    else:
        with pytest.raises(ServiceError, match=r"cannot be reached|answered 502"):
            ask(name, *arguments, **named)
    assert len(service.asked) == (2 if again else 1)


@BOTH
def test_what_is_wrong_is_not_asked_again(kind: Any) -> None:
    service = Scripted(problem(404, "not-found"))
    with pytest.raises(NotFoundError):
        asked_of(kind, service, Time())("alias", "a")
    assert len(service.asked) == 1


@BOTH
def test_an_answer_with_a_tag_is_kept_until_another_comes(kind: Any) -> None:
    moved = ALIAS.model_copy(update={"version": 2})
    answers = [
        httpx.Response(200, text=ALIAS.model_dump_json(), headers={"ETag": '"1"'}),
        httpx.Response(304, headers={"ETag": '"1"'}),
        httpx.Response(200, text=moved.model_dump_json(), headers={"ETag": '"2"'}),
        httpx.Response(304),
    ]
    service = Scripted(*answers)
    found = []
    if kind is Client:
        with Client("http://127.0.0.1:1", transport=service) as client:
            found = [client.alias("a") for _ in answers]
    else:

        async def main() -> None:
            async with AsyncClient("http://127.0.0.1:1", transport=service) as client:
                found.extend([await client.alias("a") for _ in answers])

        asyncio.run(main())
    assert found == [ALIAS, ALIAS, moved, moved]
    tags = [request.headers.get("If-None-Match") for request in service.asked]
    assert tags == [None, '"1"', '"1"', '"2"']


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 12)), max_size=40))
def test_the_cache_holds_the_latest_answers_within_its_bytes(kept: list[tuple[str, int]]) -> None:
    cache, latest = AnswerCache(10), dict[str, int]()
    for key, size in kept:
        answer = Received(status=200, reason="OK", headers=_framed(key, size), content=b"x" * size, url="")
        cache.keep(key, answer)
        latest[key] = size
        held = {one: cache.find(one) for one in "abcde"}
        assert sum(len(one.content) for one in held.values() if one is not None) <= 10
        assert (held[key] == answer) == (size <= 10)
        assert all(one is None or len(one.content) == latest[other] for other, one in held.items())


def _framed(tag: str, size: int) -> dict[str, str]:
    return {"etag": tag, "content-length": str(size)}


def test_the_cache_keeps_no_answer_that_may_have_been_cut_off() -> None:
    cache = AnswerCache()
    whole = Received(status=200, reason="OK", headers=_framed("1", 2), content=b"{}", url="")
    cache.keep("a", whole)
    cut = Received(status=200, reason="OK", headers={"etag": "2"}, content=b"{", url="")
    cache.keep("a", cut)
    assert cache.find("a") is None


@BOTH
def test_a_planner_that_takes_too_long_is_not_asked_again(kind: Any) -> None:
    service = Scripted(problem(504, "deadline"))
    with pytest.raises(DeadlineError):
        asked_of(kind, service, Time())("create_plan", PLAN_REQUEST)
    assert len(service.asked) == 1


class Listed(httpx.MockTransport):
    """A list of so many aliases, some of whose pages are shorter than they could be, or empty."""

    def __init__(self, count: int, page: int) -> None:
        self.limits: list[int] = []
        self._items = [json.loads(ALIAS.model_copy(update={"version": n}).model_dump_json()) for n in range(count)]
        self._page = page
        super().__init__(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        limit, cursor = int(request.url.params["limit"]), request.url.params.get("cursor", "0-0")
        self.limits.append(limit)
        start, turn = map(int, cursor.split("-"))
        stop = min(start + min(limit, self._page), len(self._items)) if turn % 3 else start
        more = f"{stop}-{turn + 1}" if stop < len(self._items) else None
        return httpx.Response(200, json={"items": self._items[start:stop], "next_cursor": more})


@BOTH
@given(count=st.integers(0, 450), page=st.integers(20, 300), limit=st.none() | st.integers(1, 500))
def test_a_list_has_as_many_items_as_there_are_up_to_the_limit(
    kind: Any, count: int, page: int, limit: int | None
) -> None:
    service = Listed(count, page)
    found = asked_of(kind, service, Time())("aliases", limit=limit)
    wanted = count if limit is None else min(count, limit)
    assert [alias.version for alias in found] == list(range(wanted))
    assert max(service.limits) <= 200
    assert limit is None or service.limits[0] <= limit


def test_a_page_ends_with_the_cursor_of_what_follows() -> None:
    with Client("http://127.0.0.1:1", transport=Listed(10, 4)) as client:
        page = client.aliases(limit=7).page()
        rest = client.aliases(cursor=page.next_cursor).page()
    assert [alias.version for alias in (*page.items, *rest.items)] == list(range(10))
    assert rest.next_cursor is None


@BOTH
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_refused(kind: Any, limit: int) -> None:
    with pytest.raises(InvalidInputError, match="limit: must be a whole number of at least 1"):
        asked_of(kind, Listed(3, 3), Time())("aliases", limit=limit)


def test_a_querys_own_limit_counts_and_its_filters_are_sent() -> None:
    service = Scripted(httpx.Response(200, json={"items": [], "next_cursor": None}))
    with Client("http://127.0.0.1:1", transport=service) as client:
        assert list(client.plans(PlanQuery(planner="auto", limit=3))) == []
    assert dict(service.asked[0].url.params) == {"planner": "auto", "limit": "3"}


def test_address_and_token_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("of-a-file\n")
    monkeypatch.setenv("PIPEPLAN_URL", "http://127.0.0.1:2")
    monkeypatch.setenv("PIPEPLAN_TOKEN_FILE", str(file))

    def sent(*arguments: str) -> tuple[str, str | None]:
        service = Scripted(FOUND)
        with Client(*arguments, transport=service) as client:
            client.alias("a")
        return str(service.asked[0].url.copy_with(path="/")), service.asked[0].headers.get("Authorization")

    assert sent() == ("http://127.0.0.1:2/", "Bearer of-a-file")
    assert sent("http://127.0.0.1:3", "given") == ("http://127.0.0.1:3/", "Bearer given")
    assert sent("http://127.0.0.1:3", "") == ("http://127.0.0.1:3/", None)
    file.write_text(" \n")
    with pytest.raises(InvalidInputError, match="PIPEPLAN_TOKEN_FILE: must name a file that holds a token"):
        Client()
    monkeypatch.setenv("PIPEPLAN_TOKEN_FILE", str(tmp_path / "absent"))
    with pytest.raises(InvalidInputError, match="PIPEPLAN_TOKEN_FILE: must name a readable text file"):
        AsyncClient()
    monkeypatch.setenv("PIPEPLAN_TOKEN", "secret")
    with pytest.raises(InvalidInputError, match="not by both") as caught:
        Client()
    assert "secret" not in str(caught.value)


def test_a_cancelled_task_cancels_its_plans_job() -> None:
    job = Job(id="j", task=PROFILE_TASK, state="queued", attempts=0, created_at=MOMENT, updated_at=MOMENT)
    service = Scripted(httpx.Response(202, text=job.model_dump_json()))

    async def main() -> None:
        async with AsyncClient("http://127.0.0.1:1", transport=service) as client:
            asking = asyncio.create_task(client.create_plan(PLAN_REQUEST, wait_s=1))
            while len(service.asked) < 2:
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(main())
    assert service.asked[-1].url.path == "/v1/jobs/j/cancel"
