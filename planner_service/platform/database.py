"""Database: one database by its URL, its two kinds of transaction, and the errors of its failures.

A transaction that reads sees one state of the database. One that writes is stored as a whole or not at all; on SQLite
the writers take turns and share transactions (`turns`). `reporting` turns the driver's errors into ours, and
distinguishes those after which a retry may help.
"""

import importlib.util
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    TimeoutError,
)
from sqlalchemy.pool import QueuePool

from pipeplan.errors import (
    ConflictError,
    InvalidInputError,
    MissingDependencyError,
    PipeplanError,
    ServiceError,
    UnavailableError,
    require,
)
from planner_service.platform.turns import OWNER_ONLY, PATIENCE_S, Turns, remaining_s

BUSY_RETRY_S = 1.0
CONNECTION_RETRY_S = 2.0
FULL_RETRY_S = 30.0

AWAY = "the database cannot be used now"
"""The callers' message for an unreachable database; only operators see its name, address and the cause."""

NO_SUCH_TABLE = frozenset({"42P01", "42703"})
"""PostgreSQL's codes for a table or a column that is not there."""
FULL = "53"
"""The class of PostgreSQL's codes for a disk, a memory or a table of connections that is full."""
BUSY = "40"
"""The class of PostgreSQL's codes for transactions that failed because of others."""

PASSING = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
OUT_OF_SPACE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})

DUPLICATE = frozenset({"23505", sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY})
DANGLING = frozenset({"23503", sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY})

POSTGRESQL_DRIVER = "postgresql+psycopg"
POOL_SIZE = 16
POOL_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 5.0
POSTGRESQL_OPTIONS = {
    "connect_timeout": 5,
    "keepalives_idle": 30,
    "tcp_user_timeout": 15_000,
    "application_name": "pipeplan",
}
"""A silent server is given up after 5 s during a connect, and after 15 s (in ms) during a statement."""


def is_duplicate(error: IntegrityError) -> bool:
    """Whether the statement failed because a row with this key exists already."""
    return _constraint(error) in DUPLICATE


@contextmanager
def reporting(database: str, secret: str | None) -> Iterator[None]:
    """Raises ServiceError if the database cannot do something, UnavailableError if it may be able to later.

    Raises ConflictError if a row refers to one that another transaction has just removed, or removes one that another
    has just referred to. Other broken constraints and statements are raised unchanged: the request is wrong, not the
    database. `database` is its name in messages for operators, `secret` what no message may contain.
    """
    try:
        yield
    except TimeoutError as error:
        busy = "stayed busy: there are too many requests at once"
        detail, outside = (
            f"all connections to the database {database} {busy}",
            f"all connections to the database {busy}",
        )
        raise UnavailableError(detail, BUSY_RETRY_S, outside=outside) from error
    except IntegrityError as error:
        if _constraint(error) not in DANGLING:
            raise
        raise ConflictError("another request has removed or taken what this one names; try again") from error
    except DBAPIError as error:
        # The driver's words on one line, without the statement and its parameters, and never with the password.
        cause = " ".join(str(error.orig or error).split())
        cause = cause.replace(secret, "***") if secret else cause
        reported = _reported(error, f"the database {database} cannot be used: {cause}")
        if reported is None:
            raise
        raise reported from error


def _constraint(error: IntegrityError) -> str | int | None:
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorcode", None)


def _reported(error: DBAPIError, detail: str) -> PipeplanError | None:
    """Our error for an error of the driver; None for one that is not the database's fault."""
    code = getattr(error.orig, "sqlstate", None) or ""
    if code in NO_SUCH_TABLE or (isinstance(error.orig, sqlite3.OperationalError) and "no such" in str(error.orig)):
        advice = "are its tables those of this version? `pipeplan db upgrade` brings them up to date"
        return ServiceError(f"{detail}; {advice}", outside=f"the database cannot be used; {advice}")

    if isinstance(error.orig, sqlite3.Error):
        reason = getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if reason in PASSING:
            return UnavailableError(detail, BUSY_RETRY_S, outside=AWAY)
        if reason in OUT_OF_SPACE:
            return UnavailableError(detail, FULL_RETRY_S, outside=AWAY)
        refused = isinstance(error, OperationalError) or type(error) is DatabaseError
        return (
            ServiceError(detail, outside="the database cannot be used")
            if refused and not isinstance(error, ProgrammingError)
            else None
        )

    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        classes = {BUSY: BUSY_RETRY_S, FULL: FULL_RETRY_S}
        return UnavailableError(detail, classes.get(code[:2], CONNECTION_RETRY_S), outside=AWAY)
    return None


class Database:
    """One database by its URL. `read` and `write` are its only entries, a transaction each.

    SQLite starts every transaction as deferred. One that reads before it writes then fails with "database is locked"
    when another has written in between. Writers therefore begin immediately, each in its turn (`turns`). PostgreSQL
    needs neither; its readers request a snapshot, which SQLite's readers always have.

    At most `pool_size` transactions are open at once. UnavailableError is raised if no connection becomes free within
    `pool_timeout_s`, or no turn to write or no lock within `busy_timeout_s`, or by the request's deadline
    (`turns.DEADLINE_S`). A transaction must not begin inside another.
    """

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = POOL_SIZE,
        pool_timeout_s: float = POOL_TIMEOUT_S,
        busy_timeout_s: float = PATIENCE_S,
    ) -> None:
        self.url = _parsed(url)
        self.shown = _shown(self.url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._joined: Connection | None = None
        self._turns: Turns | None = None
        self._open = _Gate()
        pool: dict[str, Any] = {
            "pool_size": pool_size,
            "max_overflow": 0,
            "pool_timeout": pool_timeout_s,
            "hide_parameters": True,
        }
        if self.is_sqlite:
            self.engine = _sqlite_engine(self.url, busy_timeout_s, pool)
            self._readers: Engine = self.engine
            self._writers: Engine = self.engine.execution_options(begin="BEGIN IMMEDIATE")
            self._turns = Turns(self._writers, Path(f"{self.url.database}-turns"), self.shown, busy_timeout_s)
        else:
            if importlib.util.find_spec("psycopg") is None:
                raise MissingDependencyError("PostgreSQL needs its driver, psycopg: pip install 'pipeplan[service]'")
            options = {name: value for name, value in POSTGRESQL_OPTIONS.items() if name not in self.url.query}
            self.engine = create_engine(self.url, pool_pre_ping=True, connect_args=options, **pool)
            snapshot: dict[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            self._readers = self.engine.execution_options(**snapshot)
            self._writers = self.engine
        self._busy_timeout_s = busy_timeout_s

    @property
    def reads_at_once(self) -> bool:
        """Whether a read would not wait now: SQLite's readers never wait for writers, and a connection is free."""
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
        begun = self._turns.write() if self._turns else self._writers.begin()
        with reporting(self.shown, self.url.password), self._open, begun as connection:
            if not self.is_sqlite:
                wait_ms = max(1, round(1000 * remaining_s(self._busy_timeout_s)))  # 0 would be no limit
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {wait_ms}")
            yield connection

    def joining(self, connection: Connection) -> "Database":
        """The same database inside an open transaction that writes: all work joins that transaction."""
        joined = copy(self)
        joined._joined = connection
        return joined

    def close(self) -> None:
        """Closes all connections, once the open transactions have ended or after CLOSE_TIMEOUT_S.

        No other begins: the thread of a cancelled task may still come, and would leave a connection open.
        The connection of a transaction that lasts longer is closed when that ends.
        """
        self._open.shut(CLOSE_TIMEOUT_S, self.engine.pool.dispose)
        self.engine.dispose()
        if self._turns:
            self._turns.close()


class _Gate:
    """How many threads are inside its block. Once it is shut, none enters: UnavailableError."""

    def __init__(self) -> None:
        self._count = 0
        self._is_shut = False
        self._leave: Callable[[], None] = lambda: None
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            if self._is_shut:
                raise UnavailableError("the service is stopping: it has closed its database")
            self._count += 1

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._count -= 1
            if self._is_shut:
                self._leave()
            self._changed.notify_all()

    def shut(self, timeout_s: float, leave: Callable[[], None]) -> None:
        """Returns once no thread is inside, or the time is over. Each that is inside calls `leave` at its end."""
        with self._changed:
            self._is_shut, self._leave = True, leave
            self._changed.wait_for(lambda: self._count == 0, timeout_s)


def _parsed(url: str) -> URL:
    """The URL with the driver that the service uses. Raises InvalidInputError."""
    rule = "must be a database URL such as sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        # Neither the value nor the cause is shown: a text that is not a URL may still hold a password.
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


def _sqlite_engine(url: URL, busy_timeout_s: float, pool: dict[str, Any]) -> Engine:
    folder = Path(url.database or "").absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceError(f"the database's folder {folder} cannot be made: {error.strerror}") from error
    with suppress(OSError):  # an existing file is opened as it is; SQLite reports everything else that is wrong
        os.close(os.open(url.database or "", os.O_CREAT | os.O_EXCL | os.O_RDWR, OWNER_ONLY))

    def configure(connection: sqlite3.Connection, _record: Any) -> None:
        """We begin transactions (`_begin`), not the driver. A commit is on the disk when it is acknowledged."""
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
    """Begins as the engine's option says: writers immediately, readers when they read first."""
    connection.exec_driver_sql(str(connection.get_execution_options().get("begin", "BEGIN")))
