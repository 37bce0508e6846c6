"""Turns: the writers to a SQLite file take turns, and waiting ones share a transaction.

SQLite's own waiting is unfair: a writer that finds the file busy sleeps ever longer, and may fail among many writers.
So the threads of a process take turns in the order of their requests, and the processes by a file lock of the operating
system, which ends with the process that holds it.

A commit waits for the disk. A writer therefore passes the open transaction on to the next waiting one, and the last one
commits for all. No writer continues before that.

    writer 1   begin, work ─┐                     ┌─ goes on
    writer 2           waits, savepoint, work ─┐  ├─ goes on
    writer 3                         waits, savepoint, work, commit

A writer that raises is rolled back to its savepoint, which does not affect the others; the first one has no savepoint,
since its transaction is not shared yet.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, Engine, RootTransaction

from pipeplan.errors import ServiceError, UnavailableError

try:
    import fcntl
except ImportError:  # not on Windows, where only SQLite's own waiting applies
    fcntl = None  # type: ignore[assignment]

OWNER_ONLY = 0o600
"""A database holds plans, names and the key of the tokens' hashes; SQLite's other files get the mode of the first."""

RETRY_AFTER_S = 1.0

PATIENCE_S = 15.0
"""How long a writer waits from its arrival."""

DEADLINE_S: ContextVar[float | None] = ContextVar("deadline_s", default=None)
"""Until when the present request may wait, by the monotonic clock. None: each transaction has its own limit."""

MOST_WRITERS = 64
"""The upper bound on writers of one transaction."""

OPEN_S = 0.05
"""After this time no writer joins a transaction: finished writers, and other processes, wait for its end."""

_LOOK_S = 0.002
"""How often a process checks whether it is its turn."""


@dataclass(slots=True)
class _Shared:
    """A transaction with its writers. `error` is the reason why nothing of it is stored; `over`: it has ended."""

    connection: Connection
    transaction: RootTransaction
    began_s: float
    writers: int = 0
    undone: bool = False
    error: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def is_open(self) -> bool:
        """Whether the transaction is still open: SQLite rolls it back when the disk is full or cannot be read."""
        driver = self.connection.connection.driver_connection
        return driver is not None and bool(driver.in_transaction)

    @property
    def takes_more(self) -> bool:
        """Whether another writer may join."""
        in_time = time.monotonic() - self.began_s < OPEN_S
        return in_time and self.writers < MOST_WRITERS and not self.undone and self.error is None and self.is_open

    @contextmanager
    def part(self) -> Iterator[None]:
        """One writer's part. An error undoes only this part, unless SQLite has ended the whole transaction."""
        self.writers += 1
        if self.writers == 1:
            try:
                yield
            except BaseException:
                self.undone = True
                raise
            return
        savepoint = self.connection.begin_nested()
        try:
            yield
            savepoint.commit()
        except BaseException as error:
            if self.is_open:
                savepoint.rollback()
            else:
                self.error = error
            raise


class Turns:
    """The writers to the SQLite file of an engine that begins immediately; `name` names the database in messages."""

    def __init__(self, engine: Engine, path: Path, name: str, patience_s: float) -> None:
        self._engine = engine
        self._path = path
        self._name = name
        self._patience_s = patience_s
        self._queue = _Queue()
        self._file: int | None = None
        self._shared: _Shared | None = None  # only the thread with the turn changes it

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is on the disk once the block has ended, alone or with those of others.

        Raises UnavailableError if no turn comes in time, and the commit's error, whichever writer commits.
        """
        deadline_s = time.monotonic() + remaining_s(self._patience_s)
        if not self._queue.enter(deadline_s - time.monotonic()):
            raise self._no_turn()
        if self._shared is None:
            try:
                self._shared = self._begin(deadline_s)
            except BaseException:
                self._queue.leave()
                raise
        shared = self._shared
        try:
            with shared.part():
                yield shared.connection
        finally:
            if not (shared.takes_more and self._queue.pass_on()):
                self._end(shared)
            shared.over.wait()
            if shared.error is not None:
                raise shared.error

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _begin(self, deadline_s: float) -> _Shared:
        self._lock(deadline_s)
        try:
            connection = self._engine.connect()
            try:
                # SQLite itself waits for locks of those who take no turns, such as its shell.
                wait_s = max(0.0, deadline_s - time.monotonic())
                _set_busy_timeout(connection, wait_s)
                transaction = connection.begin()
                _set_busy_timeout(connection, self._patience_s)
                return _Shared(connection, transaction, time.monotonic())
            except BaseException:
                connection.close()
                raise
        except BaseException:
            self._unlock()
            raise

    def _end(self, shared: _Shared) -> None:
        """Commits the transaction unless it is undone, wakes its writers, and ends the turn."""
        self._shared = None
        try:
            try:
                if shared.undone or shared.error is not None:
                    shared.transaction.rollback()
                else:
                    shared.transaction.commit()
            except BaseException:
                shared.connection.invalidate()  # a failed commit may leave the transaction open: it ends with its file
                raise
            finally:
                shared.connection.close()
        except BaseException as error:
            shared.error = shared.error or error
        finally:
            self._unlock()
            shared.over.set()
            self._queue.leave()

    def _lock(self, deadline_s: float) -> None:
        """Takes the turn among the processes: polls the lock, since `flock` itself has no time limit."""
        if fcntl is None:
            return
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
            except OSError as error:
                detail = f"the database {self._name} cannot be written to: {error}"
                raise ServiceError(detail, outside="the database cannot be written to") from error
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
        within = f"came within {self._patience_s:g} s"
        outside = f"no turn to write to the database {within}"
        return UnavailableError(f"no turn to write to {self._name} {within}", RETRY_AFTER_S, outside=outside)


def remaining_s(patience_s: float) -> float:
    """How long the present writer may wait: `patience_s`, but not beyond its request's deadline."""
    deadline_s = DEADLINE_S.get()
    return patience_s if deadline_s is None else max(0.0, min(patience_s, deadline_s - time.monotonic()))


def _set_busy_timeout(connection: Connection, duration_s: float) -> None:
    driver = connection.connection.driver_connection
    if driver is not None:
        driver.execute(f"PRAGMA busy_timeout={round(duration_s * 1000)}")


class _Queue:
    """The threads that wait for the turn, first in, first out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def enter(self, patience_s: float) -> bool:
        """Waits for the turn; returns whether it came in time."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            turn.wait(patience_s)
        finally:
            with self._lock:
                came = turn.is_set()
                if not came:
                    self._waiting.remove(turn)
        return came

    def pass_on(self) -> bool:
        """Gives the turn to the first waiting thread; returns false, and keeps the turn, if none waits."""
        with self._lock:
            if not self._waiting:
                return False
            self._waiting.popleft().set()
            return True

    def leave(self) -> None:
        """Gives the turn to the first that waits, or frees it."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False
