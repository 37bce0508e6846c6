"""Databases: what both kinds promise, and what is said when one cannot do it, with real servers and real files."""

import itertools
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Literal

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from pipeplan.errors import InvalidInputError, ServiceError, UnavailableError
from planner_service.app import create_app
from planner_service.platform.database import Database
from planner_service.platform.migrations import upgrade
from planner_service.platform.settings import Settings
from planner_service.platform.turns import DEADLINE_S
from tests.planner_service.answers import halve
from tests.planner_service.examples import profile_document
from tests.planner_service.postgresql import running
from tests.waiting import PATIENCE_S

CLIENTS = 200
COUNT = text("SELECT count(*) FROM profiles")
INSERT = text(
    "INSERT INTO profiles (id, content, model_name, device_name, dtype, blocks, created_at) "
    "VALUES (:id, '', '', '', '', 1, '2026-01-01')"
)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A database at the newest revision that waits only shortly."""
    database = Database(database_url, pool_size=2, pool_timeout_s=0.05, busy_timeout_s=0.05)
    upgrade(database)
    yield database
    database.close()


def _profiles(database: Database) -> int:
    with database.read() as connection:
        counted: int = connection.execute(COUNT).scalar_one()
        return counted


@contextmanager
def _held(transactions: int, begin: Callable[[], AbstractContextManager[Connection]]) -> Iterator[None]:
    """So many transactions, each held open by a thread of its own.

    A connection may be in use for a moment, by what the service does in the background: a holder asks again.
    """
    taken, release = threading.Barrier(transactions + 1, timeout=PATIENCE_S), threading.Event()

    def hold() -> None:
        while not taken.broken:
            with suppress(UnavailableError), begin():
                taken.wait()
                release.wait()
                return

    with ThreadPoolExecutor(transactions) as pool:
        holders = [pool.submit(hold) for _ in range(transactions)]
        taken.wait()
        try:
            yield
        finally:
            release.set()
            for holder in holders:
                holder.result()


def test_a_reader_sees_one_state_of_the_database(database: Database) -> None:
    with database.read() as connection:
        before = connection.execute(COUNT).scalar_one()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_insert, database, "one").result()
        assert connection.execute(COUNT).scalar_one() == before
    assert _profiles(database) == before + 1


def test_a_writer_that_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(LookupError), database.write() as connection:
        connection.execute(INSERT, {"id": "one"})
        raise LookupError
    assert _profiles(database) == 0


def _insert(database: Database, profile_id: str) -> None:
    with database.write() as connection:
        connection.execute(INSERT, {"id": profile_id})


def test_a_database_that_was_closed_opens_no_connection(database_url: str) -> None:
    """A thread whose task was cancelled once opened one that nobody closed."""
    database = Database(database_url)
    with database.read():
        pass
    database.close()
    for begin in (database.read, database.write):
        with pytest.raises(UnavailableError, match="the service is stopping"), begin():
            pass
    pool = database.engine.pool
    assert isinstance(pool, QueuePool) and pool.checkedin() == pool.checkedout() == 0


def test_who_gets_no_connection_in_time_is_told_when_to_come_back(database: Database) -> None:
    with _held(2, database.read), pytest.raises(UnavailableError, match="busy") as caught:
        _profiles(database)
    assert caught.value.retry_after_s > 0
    assert _profiles(database) == 0


def test_who_gets_no_turn_to_write_is_told_when_to_come_back(sqlite_url: str) -> None:
    database = Database(sqlite_url, busy_timeout_s=0.05)
    upgrade(database)
    with _held(1, database.write), pytest.raises(UnavailableError, match="turn to write"):
        _insert(database, "one")
    database.close()


def test_a_file_that_another_process_writes_to_is_busy_not_broken(sqlite_url: str) -> None:
    database = Database(sqlite_url, busy_timeout_s=0.05)
    upgrade(database)
    other = sqlite3.connect(str(database.url.database), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UnavailableError, match="locked"):
        _insert(database, "one")
    other.execute("ROLLBACK")
    _insert(database, "one")
    other.close()
    database.close()


def test_no_lock_is_waited_for_beyond_the_requests_deadline(database_url: str) -> None:
    """Each wait had its own time: for the turn, for other processes and for SQLite; on PostgreSQL there was none."""
    database = Database(database_url, busy_timeout_s=1000.0)
    upgrade(database)
    other = create_engine(database.url)
    reset = DEADLINE_S.set(time.monotonic() + 0.05)
    with other.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if database.is_sqlite else "LOCK TABLE profiles IN EXCLUSIVE MODE")
        with pytest.raises(UnavailableError, match=r"locked|lock timeout"):
            _insert(database, "one")
        connection.rollback()
    DEADLINE_S.reset(reset)
    _insert(database, "one")
    other.dispose()
    database.close()


def test_a_full_file_takes_nothing_and_says_so(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    upgrade(database)
    event.listen(database.engine, "checkout", lambda connection, *_: connection.execute("PRAGMA max_page_count=1"))
    with pytest.raises(UnavailableError, match="full") as caught, database.write() as connection:
        connection.execute(INSERT, {"id": "x" * 10**6})
    assert caught.value.retry_after_s > 1
    assert _profiles(database) == 0
    database.close()


@pytest.mark.each_case
@pytest.mark.parametrize("code", ["53100", "53300", "57P03", "40001"])
def test_what_a_server_is_short_of_may_pass(postgresql_url: str, code: str) -> None:
    """A full disk, too many connections, a server that starts, transactions in each other's way."""
    database = Database(postgresql_url)
    with pytest.raises(UnavailableError, match="not now"), database.write() as connection:
        connection.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = '{code}'; END $$")
    database.close()


def test_a_transaction_that_outlasts_the_database_closes_its_connection(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner_service.platform.database.CLOSE_TIMEOUT_S", 0)
    database = Database(database_url)
    pool = database.engine.pool
    with database.read():
        database.close()
    assert pool.checkedin() == 0  # type: ignore[attr-defined]


def test_a_broken_constraint_is_not_the_databases_failure(database: Database) -> None:
    _insert(database, "one")
    with pytest.raises(DBAPIError) as caught:
        _insert(database, "one")
    assert "one'" not in str(caught.value)  # nor do parameters get into messages and logs


def test_tables_that_are_missing_are_a_sentence(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    with pytest.raises(ServiceError, match="pipeplan db upgrade"):
        _profiles(database)
    database.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@127.0.0.1:1/plans",
        "postgresql://me@127.0.0.1:1/plans?password=hunter2",
        "postgresql+psycopg://me:hunter2@127.0.0.1:1/plans",
    ],
)
def test_a_server_out_of_reach_is_named_without_the_password(url: str) -> None:
    database = Database(url)
    with pytest.raises(UnavailableError, match="refused") as caught:
        _profiles(database)
    assert "127.0.0.1" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in str(caught.value.__cause__)
    database.close()


@pytest.mark.parametrize(
    "url", ["mysql://me:hunter2@host/plans", "sqlite://me:hunter2@", "postgresql://me:hunter2@h:x/y"]
)
def test_a_refused_url_is_shown_without_the_password(url: str) -> None:
    with pytest.raises(InvalidInputError, match="database_url") as caught:
        Database(url)
    assert "hunter2" not in repr(caught.value) + repr(caught.value.value)
    assert caught.value.__cause__ is None


def test_a_missing_driver_is_a_sentence_that_says_how_to_install_it() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None; "
        "from planner_service.platform.database import Database; Database('postgresql://host/plans')"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "MissingDependencyError: PostgreSQL needs its driver" in answer.stderr
    assert "pip install 'pipeplan[service]'" in answer.stderr


def _statuses(client: TestClient, requests: int) -> list[tuple[int, bool]]:
    """The statuses of so many clients at once, and whether each says when to come back."""
    start = threading.Barrier(requests)

    def ask(number: int) -> tuple[int, bool]:
        start.wait()
        if number % 2:
            answer = client.get("/v1/profiles")
        else:
            answer = client.post("/v1/profiles", json=profile_document(model={"name": f"model {number}"}))
        return answer.status_code, int(answer.headers.get("retry-after", 0)) > 0

    with ThreadPoolExecutor(requests) as pool:
        return list(pool.map(ask, range(requests)))


@pytest.mark.each_case
def test_two_hundred_clients_on_a_pool_of_five_are_served_or_sent_away(database_url: str) -> None:
    settings = Settings(database_url=database_url, database_pool_size=5, database_pool_timeout_s=0.01)
    app = create_app(settings, solve=halve)
    database: Database = app.state.context.database
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        with _held(5, database.read):
            assert set(_statuses(client, CLIENTS)) == {(503, True)}
        assert set(_statuses(client, CLIENTS)) <= {(200, False), (201, False), (503, True)}
        assert client.get("/readyz").status_code == 200


class _Load:
    """Clients that store profiles one after the other, until they are told to end."""

    def __init__(self, http: TestClient, clients: int) -> None:
        self.statuses: list[int] = []
        self.acknowledged: list[str] = []
        self.without_a_time: list[int] = []
        self._http = http
        self._numbers = itertools.count()
        self._news = threading.Condition()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> "_Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            document = profile_document(model={"name": f"model {next(self._numbers)}"})
            answer = self._http.post("/v1/profiles", json=document)
            with self._news:
                self.statuses.append(answer.status_code)
                if answer.status_code == 201:
                    self.acknowledged.append(answer.json()["id"])
                elif "retry-after" not in answer.headers:
                    self.without_a_time.append(answer.status_code)
                self._news.notify_all()

    def wait_for(self, status: int, times: int) -> None:
        """Returns when so many more answers have had this status."""
        with self._news:
            wanted = self.statuses.count(status) + times
            assert self._news.wait_for(lambda: self.statuses.count(status) >= wanted, timeout=PATIENCE_S)


@pytest.mark.each_case
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgresql_restarted_under_load_is_away_for_a_while_and_loses_nothing(
    mode: Literal["fast", "immediate"],
) -> None:
    with running() as server:
        app = create_app(Settings(database_url=server.url(server.new_database())), solve=halve)
        with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
            with _Load(client, 8) as load:
                load.wait_for(201, 50)
                server.stop(mode)
                load.wait_for(503, 20)
                server.start()
                load.wait_for(201, 50)
            assert set(load.statuses) == {201, 503}
            assert load.without_a_time == []
            assert {client.get(f"/v1/profiles/{kept}").status_code for kept in load.acknowledged} == {200}
