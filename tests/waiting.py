"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

PATIENCE_S = 900.0
"""What does not come in this time will not come: also where other work has nearly all of the machine."""


def wait_until(condition: Callable[[], object]) -> None:
    """Polls until something that others do has happened."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)
