"""Late: numbers that the device computes and the host looks at: read when they have long been there.

Reading one at once would wait for everything that the device still has to do, and leave it without work after that.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Look = Callable[[float], None]
"""Takes the number. It may raise."""


@dataclass(frozen=True, slots=True)
class _Number:
    batch: int
    value: Tensor
    there: torch.cuda.Event | None
    look: Look


class Late:
    """Numbers on their way to the host, read `lag` batches later; with a lag of 0 at once.

    0 is for devices on which a call returns when its work is done.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._done = 0
        self._under_way: deque[_Number] = deque()

    def add(self, value: Tensor, look: Look, *, batch: int | None = None) -> None:
        """Has a number looked at that belongs to this batch, counted from 1; None is the one at hand."""
        if self._lag == 0:
            look(float(value))
            return
        self._under_way.append(_on_its_way(self._done + 1 if batch is None else batch, value, look))

    def batch_done(self, batch: int) -> None:
        """The device has been given everything of so many batches: looks at what is old enough."""
        self._done = max(self._done, batch)
        while self._under_way and self._under_way[0].batch <= self._done - self._lag:
            self._look()

    def flush(self) -> None:
        """Waits for all numbers, and looks at them."""
        while self._under_way:
            self._look()

    def _look(self) -> None:
        number = self._under_way.popleft()
        if number.there is not None:
            number.there.synchronize()
        number.look(float(number.value))


def _on_its_way(batch: int, value: Tensor, look: Look) -> _Number:
    if value.device.type != "cuda":
        return _Number(batch, value, None, look)
    on_host = torch.empty_like(value, device="cpu", pin_memory=True)
    on_host.copy_(value, non_blocking=True)
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()
    return _Number(batch, on_host, there, look)
