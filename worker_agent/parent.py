"""Parent: a process that was started for another one ends with it."""

import os
import threading

_INTERVAL_S = 0.5


def exit_with_parent() -> None:
    """Ends this process soon after its parent has died, at once and without clean-up, whatever it is doing."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(_INTERVAL_S)
    os._exit(1)
