"""The service under test: real SQLite files made by the real migrations, a clock that is set by hand."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from planner_service.app import create_app
from planner_service.services.context import Context
from planner_service.settings import Settings
from tests.service.answers import halve


@dataclass
class Clock:
    """The moment that the service takes for now."""

    moment: datetime = field(default_factory=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))

    def __call__(self) -> datetime:
        """Now."""
        return self.moment

    def advance(self, duration_s: float) -> None:
        """Lets time pass."""
        self.moment += timedelta(seconds=duration_s)


@pytest.fixture
def clock() -> Clock:
    """The service's clock."""
    return Clock()


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """A new database's URL."""
    return f"sqlite:///{tmp_path / 'service.sqlite3'}"


@pytest.fixture
def app(database_url: str, clock: Clock) -> FastAPI:
    """The application, not started."""
    settings = Settings(database_url=database_url, max_body_bytes=2**20)
    return create_app(settings, now=clock, solve=halve)


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    """The application, started: its answers are looked at whatever their status."""
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def context(app: FastAPI, http: TestClient) -> Context:
    """What the services are called with, on the started application's database."""
    made: Context = app.state.context
    return made
