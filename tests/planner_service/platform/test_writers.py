"""Writers that wait: whoever only reads is answered meanwhile."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from sqlalchemy import text

from planner_service.platform import writers
from planner_service.platform.context import Context
from planner_service.platform.writers import SAFE, WritingRoute
from tests.planner_service.examples import PROFILE_TASK

MORE_THAN_THREADS = 60
"""The framework has 40 threads for all routes."""


def test_readers_are_answered_while_many_writers_wait(http: TestClient, context: Context) -> None:
    task = PROFILE_TASK.model_dump(mode="json")
    with ThreadPoolExecutor(MORE_THAN_THREADS) as pool:
        with context.database.write() as connection:
            if not context.database.is_sqlite:
                connection.execute(text("LOCK TABLE jobs IN EXCLUSIVE MODE"))
            posts = [pool.submit(http.post, "/v1/jobs", json=task) for _ in range(MORE_THAN_THREADS)]
            for path in ("/v1/jobs", "/v1/profiles", "/v1/agents", "/readyz", "/metrics"):
                assert http.get(path).status_code == 200
            assert not any(post.done() for post in posts)
        assert [post.result().status_code for post in posts] == [201] * MORE_THAN_THREADS


@contextmanager
def _locked(context: Context) -> Iterator[None]:
    """Nobody can write to the jobs meanwhile."""
    with context.database.write() as connection:
        if not context.database.is_sqlite:
            connection.execute(text("LOCK TABLE jobs IN EXCLUSIVE MODE"))
        yield


def test_a_writer_waits_from_its_arrival_not_from_when_a_thread_is_free(
    http: TestClient, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of forty waited for five times as long as one may: each for the threads of those before it."""
    monkeypatch.setattr(writers, "PATIENCE_S", 0.3)
    task = PROFILE_TASK.model_dump(mode="json")
    with ThreadPoolExecutor(MORE_THAN_THREADS) as pool, _locked(context):
        posts = [pool.submit(http.post, "/v1/jobs", json=task) for _ in range(5 * writers.WRITERS)]
        answers = [post.result() for post in posts]
    assert {answer.status_code for answer in answers} == {503}
    assert all(float(answer.headers["retry-after"]) > 0 for answer in answers)
    assert http.post("/v1/jobs", json=task).status_code == 201


def test_a_writer_too_many_is_told_at_once(http: TestClient, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MOST_WAITING", 1)
    task = PROFILE_TASK.model_dump(mode="json")
    with ThreadPoolExecutor(MORE_THAN_THREADS) as pool:
        with _locked(context):
            refused = [pool.submit(http.post, "/v1/jobs", json=task) for _ in range(MORE_THAN_THREADS)]
            done, waiting = wait(refused, return_when=FIRST_COMPLETED)
        answers = [post.result() for post in refused]
    assert {one.result().status_code for one in done} == {503}
    assert "wait to write" in next(iter(done)).result().json()["detail"] and waiting
    assert {answer.status_code for answer in answers} == {201, 503}


def test_whatever_may_write_waits_apart(app: FastAPI) -> None:
    """A route whose function may write must not run in the threads of those that read."""
    for route in iter_route_contexts(app.routes):
        if (route.path or "").startswith("/v1/") and not SAFE.issuperset(route.methods or ()):
            assert isinstance(route.original_route, WritingRoute), route.path
