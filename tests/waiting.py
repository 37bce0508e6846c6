"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 40.0) -> None:
    """Polls until something that others do has happened."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)
