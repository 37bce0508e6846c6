"""Processes: common tasks of a run's processes: end with their parent, know their node's place, and poll."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from pipeplan.documents.names import STRICT
from pipeplan.errors import RunFailedError

_PARENT_INTERVAL_S = 0.5


def exit_with_parent(parent: int | None = None) -> None:
    """Ends this process soon after its parent has died, at once, during any work, and without clean-up.

    `parent` is the parent's process id, by default that of the present parent. If the parent passes its
    id, its death is noticed even if it came before this call, for instance during a slow import.
    """
    watched = os.getppid() if parent is None else parent
    threading.Thread(target=_watch, args=(watched,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(_PARENT_INTERVAL_S)
    os._exit(1)


class OtherNodeError(RunFailedError):
    """This node's part ended because of another node, which may report why, or is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's place among several that run together. Node rank 0 listens at the address and port; others connect.

    `meeting` names this attempt: a straggler of an earlier attempt that connects to the same port does not join it.
    A node waits `meeting_s` for the others. The default is enough for nodes that are up to import torch.
    """

    node_rank: int
    nodes: int
    address: str
    port: int
    meeting: str
    meeting_s: int = 120

    __pydantic_config__: ClassVar = STRICT

    def ranks(self, processes: int) -> range:
        return range(self.node_rank * processes, (self.node_rank + 1) * processes)


@contextmanager
def polling(look: Callable[[], None], every_s: float, *, name: str) -> Iterator[None]:
    """Calls `look` every `every_s` seconds from a thread called `name` while the context is active."""
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
