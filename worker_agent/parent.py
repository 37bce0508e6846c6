"""Parent: a process that was started for another one ends with it."""

import os
import threading

_INTERVAL_S = 0.5


def exit_with_parent(parent: int | None = None) -> None:
    """Ends this process soon after its parent has died, at once and without clean-up, whatever it is doing.

    A parent that tells its process id is also missed if it died before this is called, as it may while a slow
    import goes on; by default it is the present one.
    """
    watched = os.getppid() if parent is None else parent
    threading.Thread(target=_watch, args=(watched,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(_INTERVAL_S)
    os._exit(1)
