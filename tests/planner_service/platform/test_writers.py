"""Writers that wait: whoever only reads is answered meanwhile."""

from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from sqlalchemy import text

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


def test_whatever_may_write_waits_apart(app: FastAPI) -> None:
    """A route whose function may write must not run in the threads of those that read."""
    for route in iter_route_contexts(app.routes):
        if (route.path or "").startswith("/v1/") and not SAFE.issuperset(route.methods or ()):
            assert isinstance(route.original_route, WritingRoute), route.path
