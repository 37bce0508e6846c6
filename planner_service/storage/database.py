"""Database: the engine, and the two kinds of transaction. Readers see a snapshot, writers take turns."""

import importlib.util
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError, TimeoutError

from planner_service.core.errors import InvalidInputError, MissingDependencyError, ServiceError, require

POSTGRESQL_DRIVER = "postgresql+psycopg"
BUSY_TIMEOUT_MS = 15_000
POOLED_CONNECTIONS = 16
OVERFLOWING_CONNECTIONS = 48
"""Together more than the server has threads: nobody waits for a connection while holding another."""


class Database:
    """One database by its URL. `read` and `write` are the only ways in, a transaction each.

    SQLite starts every transaction as deferred, and one that reads before it writes then fails with "database is
    locked" as soon as another has written in between. Writers therefore begin immediately, and those of this process
    queue at a lock before, in which waiting costs nothing. PostgreSQL needs neither.
    """

    def __init__(self, url: str) -> None:
        self.url = _parsed(url)
        self._lock = threading.Lock()
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = _sqlite_engine(self.url) if self.is_sqlite else _postgresql_engine(self.url)
        self._writers = self.engine.execution_options(begin="BEGIN IMMEDIATE")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that changes nothing and sees one state of the database."""
        with _reporting(self.url), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is stored as a whole when the block ends, or not at all when it raises."""
        with _reporting(self.url):
            if not self.is_sqlite:
                with self.engine.begin() as connection:
                    yield connection
                return
            with self._lock, self._writers.begin() as connection:
                yield connection

    def close(self) -> None:
        """Gives all connections back."""
        self.engine.dispose()


@contextmanager
def _reporting(url: URL) -> Iterator[None]:
    """What the database itself cannot do (locked, full, unreachable) becomes a ServiceError."""
    try:
        yield
    except (DatabaseError, TimeoutError) as error:
        if not isinstance(error, OperationalError | TimeoutError) and type(error) is not DatabaseError:
            raise  # a broken constraint or statement: what was asked for is wrong, not the database
        cause = getattr(error, "orig", None) or error
        raise ServiceError(f"the database {url.render_as_string()} cannot be used: {cause}") from error


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        rule = "must be a database URL such as sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
        raise InvalidInputError("database_url", rule, "a text that is no URL") from error
    shown = parsed.render_as_string()
    if parsed.get_backend_name() == "sqlite":
        in_memory = parsed.database in (None, "", ":memory:")
        require(not in_memory, "database_url", "must name a file: sqlite:///FILE", shown)
        return parsed
    is_postgresql = parsed.drivername in ("postgresql", "postgres", POSTGRESQL_DRIVER)
    require(is_postgresql, "database_url", "must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME", shown)
    return parsed.set(drivername=POSTGRESQL_DRIVER)


def _postgresql_engine(url: URL) -> Engine:
    if importlib.util.find_spec("psycopg") is None:
        raise MissingDependencyError("PostgreSQL needs its driver: run `pip install 'pipeplan[service]'`")
    return create_engine(url, pool_size=POOLED_CONNECTIONS, max_overflow=OVERFLOWING_CONNECTIONS, pool_pre_ping=True)


def _sqlite_engine(url: URL) -> Engine:
    folder = Path(url.database or "").absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceError(f"the database's folder {folder} cannot be made: {error.strerror}") from error
    engine = create_engine(url, pool_size=POOLED_CONNECTIONS, max_overflow=OVERFLOWING_CONNECTIONS)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: sqlite3.Connection, _record: Any) -> None:
    """Transactions are ours to begin (`_begin`), not the driver's, and a commit is on the disk when it is answered."""
    connection.isolation_level = None
    try:
        for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")
    except sqlite3.Error:
        connection.close()
        raise


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(str(connection.get_execution_options().get("begin", "BEGIN")))
