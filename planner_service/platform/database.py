"""Failures: what the database cannot do, told apart by whether asking again may help.

Turns: who writes to a SQLite file, one at a time, among the threads of a process and among processes.

SQLite itself lets a writer that finds the file busy sleep longer and longer, so that with many writers one may miss
every chance for as long as it is ready to wait. A lock of the operating system's on a file beside it is looked at often
enough to be fair, and goes with the process that holds it.

Database: the engine, and the two kinds of transaction. Readers see one state of it, SQLite's writers take turns.
"""

import importlib.util
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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

BUSY_RETRY_S = 1.0
CONNECTION_RETRY_S = 2.0
FULL_RETRY_S = 30.0

NO_SUCH_TABLE = frozenset({"42P01", "42703"})
"""PostgreSQL's codes for a table or a column that is not there."""
FULL = "53"
"""The class of PostgreSQL's codes for a disk, a memory or a table of connections that is full."""
BUSY = "40"
"""The class for transactions that others got in the way of."""

PASSING = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
OUT_OF_SPACE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})

DUPLICATE = frozenset({"23505", sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY})
DANGLING = frozenset({"23503", sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY})


def is_duplicate(error: IntegrityError) -> bool:
    """Whether a row with this key was there already."""
    return _constraint(error) in DUPLICATE


@contextmanager
def reporting(database: str, secret: str | None) -> Iterator[None]:
    """What the database itself cannot do becomes a ServiceError, one that may pass an UnavailableError.

    A row that names one which another transaction has just removed, or the other way round, is a ConflictError. Other
    broken constraints and statements are raised as they are: what was asked for is wrong, not the database.
    `database` is how messages name it, `secret` what they must not say.
    """
    try:
        yield
    except TimeoutError as error:
        detail = f"all connections to the database {database} stayed busy; too many ask at once"
        raise UnavailableError(detail, BUSY_RETRY_S) from error
    except IntegrityError as error:
        if _constraint(error) not in DANGLING:
            raise
        raise ConflictError("what this names was removed, or named, by somebody else meanwhile; ask again") from error
    except DBAPIError as error:
        reported = _reported(error, f"the database {database} cannot be used: {_cause(error, secret)}")
        if reported is None:
            raise
        raise reported from error


def _constraint(error: IntegrityError) -> str | int | None:
    """PostgreSQL's code for the constraint that is broken, or SQLite's."""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorcode", None)


def _reported(error: DBAPIError, detail: str) -> PipeplanError | None:
    code = getattr(error.orig, "sqlstate", None) or ""
    if code in NO_SUCH_TABLE or (isinstance(error.orig, sqlite3.OperationalError) and "no such" in str(error.orig)):
        return ServiceError(f"{detail}; are its tables this version's? `pipeplan db upgrade` brings them up to date")
    if isinstance(error.orig, sqlite3.Error):
        return _of_sqlite(error, detail)
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
        return UnavailableError(detail, _retry_after_s(code))
    return None


def _of_sqlite(error: DBAPIError, detail: str) -> PipeplanError | None:
    code = getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in PASSING:
        return UnavailableError(detail, BUSY_RETRY_S)
    if code in OUT_OF_SPACE:
        return UnavailableError(detail, FULL_RETRY_S)
    refused = isinstance(error, OperationalError) or type(error) is DatabaseError
    return ServiceError(detail) if refused and not isinstance(error, ProgrammingError) else None


def _retry_after_s(code: str) -> float:
    if code.startswith(BUSY):
        return BUSY_RETRY_S
    return FULL_RETRY_S if code.startswith(FULL) else CONNECTION_RETRY_S


def _cause(error: DBAPIError, secret: str | None) -> str:
    """The driver's words on one line, without the statement and its parameters, and never with the password."""
    words = " ".join(str(error.orig or error).split())
    return words.replace(secret, "***") if secret else words


try:
    import fcntl
except ImportError:  # where there is none, SQLite's own waiting is all
    fcntl = None  # type: ignore[assignment]

_LOOK_S = 0.002


class Turns:
    """The turns of one process. `name` is how messages call the database."""

    def __init__(self, path: Path, name: str, patience_s: float) -> None:
        self._path = path
        self._name = name
        self._patience_s = patience_s
        self._threads = threading.Lock()
        self._file: int | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for a turn and holds it. Raises UnavailableError if none comes up in time."""
        deadline_s = time.monotonic() + self._patience_s
        if not self._threads.acquire(timeout=self._patience_s):
            raise self._no_turn()
        try:
            self._lock(deadline_s)
            try:
                yield
            finally:
                self._unlock()
        finally:
            self._threads.release()

    def close(self) -> None:
        """Lets go of the file."""
        with self._threads:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _lock(self, deadline_s: float) -> None:
        if fcntl is None:
            return
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ServiceError(f"the database {self._name} cannot be written to: {error}") from error
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise self._no_turn() from None
                time.sleep(_LOOK_S)

    def _unlock(self) -> None:
        if fcntl is not None and self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _no_turn(self) -> UnavailableError:
        return UnavailableError(f"no turn to write to {self._name} came up within {self._patience_s:g} s")


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
