"""The service under test: real databases of both kinds made by the real migrations, a clock that is set by hand."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from planner_service.app import create_app
from planner_service.platform.context import Context
from planner_service.platform.database import Database
from planner_service.platform.migrations import upgrade
from planner_service.platform.settings import Settings
from tests.planner_service.answers import halve
from tests.planner_service.postgresql import PostgreSQL, running


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


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """The tests' own PostgreSQL, started for the first that asks."""
    with running() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: PostgreSQL) -> Iterator[str]:
    """The URL of a new database on PostgreSQL, at the newest revision."""
    name = postgresql.new_database()
    yield postgresql.url(name)
    postgresql.drop(name)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file at the newest revision."""
    path = tmp_path_factory.mktemp("template") / "service.sqlite3"
    database = Database(f"sqlite:///{path}")
    upgrade(database)
    database.close()
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """The URL of a new SQLite file, at the newest revision."""
    copied = shutil.copy(sqlite_template, tmp_path / "service.sqlite3")
    return f"sqlite:///{copied}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.campaign)])
def database_url(request: pytest.FixtureRequest) -> str:
    """A new database's URL, on each kind of database."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def empty_database_url(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Iterator[str]:
    """The URL of another new database of the same kind, which has no tables yet."""
    if database_url.startswith("sqlite"):
        yield f"sqlite:///{tmp_path / 'empty.sqlite3'}"
        return
    server: PostgreSQL = request.getfixturevalue("postgresql")
    name = server.empty_database()
    yield server.url(name)
    server.drop(name)


@pytest.fixture
def app(database_url: str, clock: Clock) -> FastAPI:
    """The application, not started. Its background plays no plans: a test that has one played does so itself."""
    settings = Settings(database_url=database_url, max_body_bytes=2**20, price_instructions=0)
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
