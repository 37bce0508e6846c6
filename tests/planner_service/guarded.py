"""A service that demands tokens, with one in its database."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from fastapi.testclient import TestClient

from planner_service.app import create_app
from planner_service.platform.context import Context
from planner_service.platform.migrations import upgrade
from planner_service.platform.settings import Settings
from tests.planner_service.answers import halve
from tests.planner_service.tokens import made

ORIGIN = "http://127.0.0.1"


@contextmanager
def guarding(database_url: str, now: Callable[[], datetime], **settings: Any) -> Iterator[TestClient]:
    """Such a service, started; it is asked as a browser and as a program on this machine ask."""
    chosen = {"require_tokens": True, **settings}
    app = create_app(Settings(database_url=database_url, **chosen), now=now, solve=halve)
    upgrade(app.state.context.database)
    made(app.state.context, "admin", name="first")
    with TestClient(app, base_url=ORIGIN, raise_server_exceptions=False, follow_redirects=False) as client:
        yield client


def context_of(client: TestClient) -> Context:
    """The service's context."""
    context: Context = client.app.state.context  # type: ignore[attr-defined]
    return context
