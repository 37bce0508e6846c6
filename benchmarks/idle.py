"""Idle: whether anything else uses this machine, which would spoil a measurement."""

import time
from pathlib import Path

_LOOK_S = 2.0


def busy_cores() -> float:
    """How many cores are in use over two seconds in which this process sleeps."""
    before, now_s = _busy_ticks(), time.monotonic()
    time.sleep(_LOOK_S)
    return (_busy_ticks() - before) / 100 / (time.monotonic() - now_s)


def _busy_ticks() -> int:
    """Ticks (1/100 s) spent in anything but waiting, over all cores."""
    user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8])
    return user + nice + system + sum(rest)
