"""Parent: a process that was started for another one ends with it.

Place: where a node stands among several that run together.

Polling: looking at something again and again while something else goes on.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from pipeplan.documents.profile import STRICT
from pipeplan.errors import RunFailedError

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


class OtherNodeError(RunFailedError):
    """This node's part ended because of another node, which may say why, or is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's place among several that run together. Node rank 0 offers the address and the port; others go there.

    `meeting` names this attempt: a straggler of an earlier one that comes to the same port finds nothing of it there.
    A node waits `meeting_s` for the others: by default as long as those need that are up, to import torch.
    """

    node_rank: int
    nodes: int
    address: str
    port: int
    meeting: str
    meeting_s: int = 120

    __pydantic_config__: ClassVar = STRICT

    def ranks(self, processes: int) -> range:
        """The ranks of this node's processes."""
        return range(self.node_rank * processes, (self.node_rank + 1) * processes)


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
