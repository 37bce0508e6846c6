"""Lock: one run at a time in a folder.

    run.lock      whoever launches a run holds it alone; it says who that is
    ranks/alive   every rank holds it, together with the others, for as long as it lives

The ranks have one of their own because they may outlive their launcher: for half a second where it is killed, for good
where a rank is stopped. The system lets go of a lock when its process ends, however it ends.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from platform import node

from pipeplan.errors import InvalidInputError, RunFailedError

_log = logging.getLogger(__name__)

LEFT_OVER_S = 10.0
"""How long the ranks of a run whose launcher was killed are waited for."""

_LOOK_S = 0.1


@contextmanager
def holding(root: Path) -> Iterator[None]:
    """Holds a run's folder, which it makes where there is none.

    Raises InvalidInputError that names the holder where another run has it, RunFailedError where it cannot be made.
    """
    try:
        (root / "ranks").mkdir(parents=True, exist_ok=True)
        descriptor = _open(root / "run.lock")
    except OSError as error:
        raise RunFailedError(f"cannot prepare the run's folder {root}: {error}") from error
    try:
        if not _take(descriptor, fcntl.LOCK_EX, root):
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            rule = f"must be free, and {holder or 'another run'} has it: wait for its end, or name another folder"
            raise InvalidInputError("out", rule, str(root))
        os.ftruncate(descriptor, 0)
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        os.pwrite(descriptor, f"process {os.getpid()} on {node()}, since {started}\n".encode(), 0)
        _await_ranks(root)
        yield
    finally:
        os.close(descriptor)


def live_in(root: Path) -> None:
    """Says that a rank of this folder's run lives, until this process ends."""
    _take(_open(root / "ranks" / "alive"), fcntl.LOCK_SH, root)


def _await_ranks(root: Path) -> None:
    """Raises InvalidInputError if ranks of an earlier run go on."""
    descriptor = _open(root / "ranks" / "alive")
    try:
        deadline_s = time.monotonic() + LEFT_OVER_S
        while not _take(descriptor, fcntl.LOCK_EX, root):
            if time.monotonic() > deadline_s:
                rule = "must be free, and ranks of an earlier run, whose launcher is gone, still live: end them first"
                raise InvalidInputError("out", rule, str(root))
            time.sleep(_LOOK_S)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _take(descriptor: int, kind: int, root: Path) -> bool:
    """Whether the lock could be had at once. Says so where the file system has none: then nobody is kept out."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning("%s: the file system has no locks (%s): two runs in this folder would not be noticed", root, error)
    return True
