"""Events: what happens to jobs and runs, told in order, resumed after any, by whichever process of the service."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import Connection, delete, func, select
from sqlalchemy import event as sqlalchemy_event

from pipeplan.errors import UnavailableError
from pipeplan.protocol.jobs import Completion, Failure, Heartbeat, Lease, Progress
from pipeplan.protocol.runs import Event, events_in
from planner_service.app import create_app
from planner_service.events import service as events
from planner_service.events.feed import Feed
from planner_service.events.store import Subject
from planner_service.jobs import service as jobs
from planner_service.platform import tables
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.settings import Settings
from tests.planner_service.answers import halve
from tests.planner_service.conftest import Clock
from tests.planner_service.examples import ANY_WORK, PROFILE_RESULT, PROFILE_TASK, run_task, store_plan
from tests.planner_service.servers import pipeplan, served
from tests.waiting import PATIENCE_S

HOUR_S = 3600.0


def _leased(context: Context) -> Lease:
    jobs.enqueue(context, PROFILE_TASK)
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    return lease


def _beat(context: Context, lease: Lease, done: int) -> None:
    jobs.heartbeat(context, lease.job.id, Heartbeat(token=lease.token, progress=Progress(done=done, total=3)))


def _done(context: Context) -> str:
    """A job that was profiled in three steps; its id."""
    lease = _leased(context)
    for step in (1, 2, 2, 3):
        _beat(context, lease, step)
    jobs.complete(context, lease.job.id, Completion(token=lease.token, result=PROFILE_RESULT))
    return lease.job.id


def _read(http: TestClient, path: str, **headers: str) -> list[Event]:
    answer = http.get(path, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return list(events_in(answer.text.split("\n")))


def test_a_jobs_events_tell_each_change_once_and_end_with_it(http: TestClient, context: Context) -> None:
    told = _read(http, f"/v1/jobs/{_done(context)}/events")
    assert [event.number for event in told] == [1, 2, 3, 4, 5, 6]
    assert [event.kind for event in told] == ["queued", "leased", "progress", "progress", "progress", "succeeded"]
    assert [event.data["progress"]["done"] for event in told[2:5]] == [1, 2, 3]
    assert told[1].data["agent"] == "node-1"


def test_they_are_resumed_after_any_of_them(http: TestClient, context: Context) -> None:
    path = f"/v1/jobs/{_done(context)}/events"
    assert [event.number for event in _read(http, path, **{"Last-Event-ID": "3"})] == [4, 5, 6]
    assert [event.number for event in _read(http, f"{path}?after=5")] == [6]
    assert [event.number for event in _read(http, f"{path}?after=1", **{"Last-Event-ID": "5"})] == [6]
    assert http.get(path, headers={"Last-Event-ID": "6"}).status_code == 204


@pytest.mark.each_case
@pytest.mark.parametrize("number", ["-1", "x", "1.5", "99999999999999999999"])
def test_a_number_that_is_none_is_refused(http: TestClient, context: Context, number: str) -> None:
    path = f"/v1/jobs/{_done(context)}/events"
    assert http.get(path, headers={"Last-Event-ID": number}).status_code == 422
    assert http.get(path, params={"after": number}).status_code == 422


def test_what_does_not_exist_has_no_events(http: TestClient) -> None:
    assert http.get("/v1/jobs/nothing/events").status_code == 404
    assert http.get("/v1/runs/nothing/events").status_code == 404


def test_a_runs_events_are_those_of_its_job(http: TestClient, context: Context) -> None:
    job = jobs.enqueue(context, run_task(store_plan(context)))
    lease = jobs.lease(context, ANY_WORK)
    assert lease is not None
    _beat(context, lease, 1)
    jobs.fail(context, job.id, Failure(token=lease.token, error="rank 1 ran out of memory"))
    told = _read(http, f"/v1/runs/{job.run_id}/events")
    assert [event.kind for event in told] == ["queued", "leased", "progress", "failed"]
    assert told[-1].data["error"] == "rank 1 ran out of memory"


def test_a_stream_tells_what_happens_while_it_is_open(http: TestClient, context: Context) -> None:
    lease = _leased(context)
    told: list[Event] = []
    reader = threading.Thread(target=lambda: told.extend(_read(http, f"/v1/jobs/{lease.job.id}/events")))
    reader.start()
    _beat(context, lease, 1)
    jobs.cancel(context, lease.job.id)
    reader.join()
    assert [event.kind for event in told] == ["queued", "leased", "progress", "cancelled"]


def test_a_job_that_is_tried_again_goes_on_in_the_same_stream(http: TestClient, context: Context) -> None:
    lease = _leased(context)
    jobs.cancel(context, lease.job.id)
    jobs.retry(context, lease.job.id)
    jobs.cancel(context, lease.job.id)
    told = _read(http, f"/v1/jobs/{lease.job.id}/events")
    assert [event.kind for event in told] == ["queued", "leased", "cancelled", "queued", "cancelled"]


def test_a_change_that_is_not_stored_is_not_told(context: Context) -> None:
    lease = _leased(context)

    def fail_late() -> None:
        with context.database.write() as connection:
            jobs.cancel(_joined(context, connection), lease.job.id)
            raise ValueError("after the change")

    with pytest.raises(ValueError, match="after the change"):
        fail_late()
    with context.database.read() as connection:
        kinds = connection.execute(select(tables.events.c.kind).order_by(tables.events.c.number)).scalars().all()
    assert kinds == ["queued", "leased"]


def _joined(context: Context, connection: Connection) -> Context:
    return replace(context, database=context.database.joining(connection))


def test_events_go_with_their_job(context: Context) -> None:
    job_id = _done(context)
    with context.database.write() as connection:
        connection.execute(delete(tables.jobs).where(tables.jobs.c.id == job_id))
        assert connection.execute(select(func.count()).select_from(tables.events)).scalar_one() == 0


def test_a_follower_hears_what_another_process_writes(context: Context, database_url: str, clock: Clock) -> None:
    other = Context(database=Database(database_url), solve=halve, now=clock)
    lease = _leased(context)

    async def follow() -> list[str]:
        kinds: list[str] = []
        async for event in Feed(other, followers=1).follow(("job", lease.job.id), 0, silence_s=60, longest_s=HOUR_S):
            assert event is not None
            kinds.append(event.kind)
            if event.kind == "leased":
                await asyncio.to_thread(jobs.cancel, context, lease.job.id)
        return kinds

    assert asyncio.run(follow()) == ["queued", "leased", "cancelled"]
    other.database.close()


def test_events_are_read_once_for_all_who_follow_one_subject(context: Context) -> None:
    lease, other = _leased(context), _leased(context)
    reads: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "events.number >" in statement:
            reads.append(statement)

    async def follow() -> list[list[int]]:
        feed = Feed(context, followers=50)
        told: list[list[int]] = [[] for _ in range(20)]
        heard = asyncio.Condition()

        async def one(place: int) -> None:
            # Half of them have seen the first event already; one follows another job.
            subject: Subject = ("job", other.job.id if place == 19 else lease.job.id)
            async for event in feed.follow(subject, place % 2, silence_s=60, longest_s=HOUR_S):
                assert event is not None
                async with heard:
                    told[place].append(event.number)
                    heard.notify_all()

        async with asyncio.TaskGroup() as group:
            for place in range(20):
                group.create_task(one(place))
            for done in range(1, 4):
                async with heard:
                    while not all(done + 1 in numbers for numbers in told[:19]):
                        await heard.wait()
                if done == 1:
                    sqlalchemy_event.listen(context.database.engine, "before_cursor_execute", note)
                await asyncio.to_thread(_beat, context, lease, done)
            await asyncio.to_thread(jobs.cancel, context, lease.job.id)
            await asyncio.to_thread(jobs.cancel, context, other.job.id)
        return told

    told = asyncio.run(follow())
    sqlalchemy_event.remove(context.database.engine, "before_cursor_execute", note)
    assert told[:19] == [[2, 3, 4, 5, 6] if place % 2 else [1, 2, 3, 4, 5, 6] for place in range(19)]
    assert told[19] == [2, 3]
    assert len(reads) <= 2 * 5  # five changes of two jobs; a first look at what was read already reads it again


def test_who_comes_late_gets_what_is_no_longer_kept(context: Context) -> None:
    lease = _leased(context)
    for done in range(events.PAGE + 5):
        _beat(context, lease, done)
    last = 2 + events.PAGE + 5

    async def follow() -> list[int]:
        feed = Feed(context, followers=2)
        numbers: list[int] = []
        async with aclosing(feed.follow(("job", lease.job.id), 0, silence_s=60, longest_s=HOUR_S)) as first:
            while (event := await anext(first)) is None or event.number < last:
                pass
            async with aclosing(feed.follow(("job", lease.job.id), 0, silence_s=60, longest_s=HOUR_S)) as late:
                while not numbers or numbers[-1] < last:
                    told = await anext(late)
                    assert told is not None
                    numbers.append(told.number)
        return numbers

    assert asyncio.run(follow()) == list(range(1, last + 1))


def test_silence_is_told_and_a_stream_ends_after_its_time(context: Context) -> None:
    lease = _leased(context)

    async def follow() -> list[Event | None]:
        feed = Feed(context, followers=1)
        following = feed.follow(("job", lease.job.id), 2, silence_s=0.01, longest_s=0.1)
        return [event async for event in following]

    told = asyncio.run(follow())
    assert told
    assert set(told) == {None}


def test_followers_are_limited_and_one_that_leaves_makes_room(context: Context) -> None:
    lease = _leased(context)
    subject = ("job", lease.job.id)

    async def follow() -> None:
        feed = Feed(context, followers=1)
        feed.require_room()
        async with aclosing(feed.follow(subject, 0, silence_s=60, longest_s=HOUR_S)) as following:  # type: ignore[arg-type]
            assert (await anext(following)) is not None
            with pytest.raises(UnavailableError, match="1 streams"):
                feed.require_room()
        feed.require_room()
        assert feed.followers == 0
        feed.close()
        with pytest.raises(UnavailableError, match="stopping"):
            feed.require_room()

    asyncio.run(follow())


def test_too_many_streams_are_a_503_and_a_client_that_goes_frees_its_place(database_url: str, clock: Clock) -> None:
    app = create_app(Settings(database_url=database_url, event_streams=1), now=clock, solve=halve)
    with TestClient(app, base_url="http://127.0.0.1") as http:
        context: Context = app.state.context
        lease = _leased(context)
        path = f"/v1/jobs/{lease.job.id}/events"
        with _streaming(app, path) as first:
            assert b"event: queued" in first.read()
            refused = http.get(path)
            assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
        jobs.cancel(context, lease.job.id)
        assert _read(http, path)[-1].kind == "cancelled"


class _Streaming:
    """A request at the application itself, whose client goes away at the end of the block."""

    def __init__(self, app: FastAPI, path: str) -> None:
        self._app, self._path = app, path
        self._gone = asyncio.Event()
        self._said = bytearray()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def __enter__(self) -> "_Streaming":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._gone.set)
        self._thread.join()
        self._loop.close()

    def read(self) -> bytes:
        """What came until there were events."""
        deadline_s = time.monotonic() + 30
        while b"event:" not in self._said and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return bytes(self._said)

    async def _run(self) -> None:
        head = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http"}
        address = {"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "", "query_string": b""}
        path = {"path": self._path, "raw_path": self._path.encode(), "headers": [(b"host", b"127.0.0.1")]}
        started = False

        async def receive() -> dict[str, Any]:
            nonlocal started
            if not started:
                started = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self._said += message.get("body", b"")

        await self._app({**head, **address, **path}, receive, send)


def _streaming(app: FastAPI, path: str) -> _Streaming:
    return _Streaming(app, path)


def _lines(*texts: str) -> Iterator[str]:
    for text in texts:
        yield from text.split("\n")


def test_a_stream_that_is_cut_off_gives_whole_events_only() -> None:
    whole = {"number": 1, "kind": "queued", "data": {}, "created_at": "2026-01-02T03:04:05Z"}
    text = f": a comment\nretry: 1000\n\nevent: queued\ndata: {json.dumps(whole)}\nid: 1\n\n"
    assert [event.number for event in events_in(_lines(text, 'event: leased\ndata: {"number": 2'))] == [1]


def spoken(lines: Iterator[str]) -> Iterator[str]:
    """A stream's lines; fails at the third comment of a stream that goes on in silence."""
    comments = 0
    for line in lines:
        comments += line == ": still here"
        assert comments < 3, "the stream goes on"
        yield line


@pytest.mark.parametrize("ends", ["revoked", "expired"])
def test_a_stream_ends_with_its_callers_token(tmp_path: Path, ends: str) -> None:
    """It went on for a quarter of an hour."""
    file = tmp_path / "service.sqlite3"
    given = ("--database", f"sqlite:///{file}", "--scope", "plan", "--name", "watcher", "--json")
    made = pipeplan("token", "create", *given, "--expires", "5s" if ends == "expired" else "1d")
    headers = {"Authorization": f"Bearer {json.loads(made.stdout)['token']}"}
    with served(file, PIPEPLAN_REQUIRE_TOKENS="true") as url, httpx.Client(base_url=url, headers=headers) as client:
        job_id = client.post("/v1/jobs", json=PROFILE_TASK.model_dump(mode="json")).json()["id"]
        with client.stream("GET", f"/v1/jobs/{job_id}/events", timeout=PATIENCE_S) as answer:
            told = events_in(spoken(answer.iter_lines()))
            assert next(told).kind == "queued"
            if ends == "revoked":
                pipeplan("token", "revoke", "watcher", "--database", f"sqlite:///{file}")
            assert list(told) == []
        assert client.get(f"/v1/jobs/{job_id}/events").status_code == 401
