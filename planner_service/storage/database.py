"""Database: the engine, and the two kinds of transaction. Readers see one state of it, SQLite's writers take turns."""

import importlib.util
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool

from pipeplan.errors import InvalidInputError, MissingDependencyError, ServiceError, require
from planner_service.storage.failures import reporting
from planner_service.storage.turns import Turns

POSTGRESQL_DRIVER = "postgresql+psycopg"
POOL_SIZE = 16
POOL_TIMEOUT_S = 2.0
BUSY_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 5.0
POSTGRESQL_OPTIONS = {
    "connect_timeout": 5,
    "keepalives_idle": 30,
    "tcp_user_timeout": 15_000,
    "application_name": "pipeplan",
}
"""A server that went silent is given up after 5 s while connecting and 15 s (in ms) while it owes an answer."""


class Database:
    """One database by its URL. `read` and `write` are the only ways in, a transaction each.

    SQLite starts every transaction as deferred, and one that reads before it writes then fails with "database is
    locked" as soon as another has written in between. Writers therefore begin immediately, and take turns before
    (`turns`). PostgreSQL needs neither; there a reader asks for a snapshot, which SQLite's readers have anyway.

    At most `pool_size` transactions are open at once; who gets none within `pool_timeout_s`, or on SQLite no turn to
    write within `busy_timeout_s`, meets an UnavailableError. A transaction must not be begun inside another.
    """

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = POOL_SIZE,
        pool_timeout_s: float = POOL_TIMEOUT_S,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        self.url = _parsed(url)
        self.shown = _shown(self.url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._joined: Connection | None = None
        self._turns: Turns | None = None
        self._open = _Counter()
        pool = {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": pool_timeout_s, "hide_parameters": True}
        if self.is_sqlite:
            self._turns = Turns(Path(f"{self.url.database}-turns"), self.shown, busy_timeout_s)
            self.engine = _sqlite_engine(self.url, busy_timeout_s, pool)
            self._readers: Engine = self.engine
            self._writers: Engine = self.engine.execution_options(begin="BEGIN IMMEDIATE")
        else:
            self.engine = _postgresql_engine(self.url, pool)
            snapshot: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            self._readers = self.engine.execution_options(**snapshot)
            self._writers = self.engine

    @property
    def reads_at_once(self) -> bool:
        """Whether a read waits for nobody now: SQLite's readers do not wait for writers, and a connection is free."""
        pool = self.engine.pool
        return self.is_sqlite and isinstance(pool, QueuePool) and pool.checkedout() < pool.size()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that changes nothing and sees one state of the database."""
        if self._joined is not None:
            yield self._joined
            return
        with reporting(self.shown, self.url.password), self._open, self._readers.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is stored as a whole when the block ends, or not at all when it raises."""
        if self._joined is not None:
            yield self._joined
            return
        turn = self._turns.turn() if self._turns else nullcontext()
        with reporting(self.shown, self.url.password), self._open, turn, self._writers.begin() as connection:
            yield connection

    def joining(self, connection: Connection) -> "Database":
        """The same database inside a transaction to write that is open: what is done there is a part of it."""
        joined = copy(self)
        joined._joined = connection
        return joined

    def close(self) -> None:
        """Gives all connections back, once the transactions that threads are in have ended, or after a while."""
        self._open.wait_for_none(CLOSE_TIMEOUT_S)
        self.engine.dispose()
        if self._turns:
            self._turns.close()


class _Counter:
    """How many are inside."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_for_none(self, timeout_s: float) -> None:
        """Returns once nobody is inside, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, timeout_s)


def _parsed(url: str) -> URL:
    rule = "must be a database URL such as sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        # Neither the value nor the cause is shown: what is no URL may still hold a password.
        raise InvalidInputError("database_url", rule, "a text that is no URL") from None if "@" in url else error
    if parsed.drivername == "sqlite":
        in_memory = parsed.database in (None, "", ":memory:")
        require(not in_memory, "database_url", "must name a file: sqlite:///FILE", _shown(parsed))
        return parsed
    require(parsed.drivername in ("postgresql", POSTGRESQL_DRIVER), "database_url", rule, _shown(parsed))
    return parsed.set(drivername=POSTGRESQL_DRIVER)


def _shown(url: URL) -> str:
    """The URL without secrets, in the form in which people write it."""
    query = {key: "***" if "password" in key else value for key, value in url.query.items()}
    return url.set(drivername=url.get_backend_name(), query=query).render_as_string()


def _postgresql_engine(url: URL, pool: dict[str, Any]) -> Engine:
    if importlib.util.find_spec("psycopg") is None:
        raise MissingDependencyError("PostgreSQL needs its driver, psycopg: pip install 'pipeplan[service]'")
    options = {name: value for name, value in POSTGRESQL_OPTIONS.items() if name not in url.query}
    return create_engine(url, pool_pre_ping=True, connect_args=options, **pool)


def _sqlite_engine(url: URL, busy_timeout_s: float, pool: dict[str, Any]) -> Engine:
    folder = Path(url.database or "").absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceError(f"the database's folder {folder} cannot be made: {error.strerror}") from error

    def configure(connection: sqlite3.Connection, _record: Any) -> None:
        """Transactions are ours to begin (`_begin`), not the driver's; a commit is on the disk when it is answered."""
        connection.isolation_level = None
        busy_timeout = f"busy_timeout={round(busy_timeout_s * 1000)}"
        try:
            for pragma in (busy_timeout, "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")
        except sqlite3.Error:
            connection.close()
            raise

    engine = create_engine(url, **pool)
    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(str(connection.get_execution_options().get("begin", "BEGIN")))
