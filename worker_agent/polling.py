"""Polling: looking at something again and again while something else goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def polling(look: Callable[[], None], every_s: float, *, name: str) -> Iterator[None]:
    """While it is active, `look` is called every so many seconds from a thread of that name."""
    stop = threading.Event()

    def follow() -> None:
        while not stop.wait(every_s):
            look()

    thread = threading.Thread(target=follow, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
