"""Turns: who writes to a SQLite file, one at a time, among the threads of a process and among processes.

SQLite itself lets a writer that finds the file busy sleep longer and longer, so that with many writers one may miss
every chance for as long as it is ready to wait. A lock of the operating system's on a file beside it is looked at often
enough to be fair, and goes with the process that holds it.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeplan.errors import ServiceError, UnavailableError

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
