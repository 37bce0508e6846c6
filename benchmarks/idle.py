"""Idle: whether anything else uses this machine, which would spoil a measurement."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_S = 2.0


def busy_cores() -> float:
    """How many cores are in use during two seconds in which this process sleeps."""
    before, now_s = _busy_ticks(), time.monotonic()
    time.sleep(_LOOK_S)
    return (_busy_ticks() - before) / 100 / (time.monotonic() - now_s)


@contextmanager
def watched_others() -> Iterator[list[float]]:
    """While the body runs its children: afterwards the list holds how many cores others had in use meanwhile."""
    found: list[float] = []
    before, own_s, now_s = _busy_ticks(), _children_s(), time.monotonic()
    yield found
    used_s = (_busy_ticks() - before) / 100 - (_children_s() - own_s)
    found.append(max(used_s / (time.monotonic() - now_s), 0.0))


def _children_s() -> float:
    """Processor seconds of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _busy_ticks() -> int:
    """Ticks (1/100 s) spent in anything but waiting, over all cores."""
    user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8])
    return user + nice + system + sum(rest)
