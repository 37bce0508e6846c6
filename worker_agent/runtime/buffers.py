"""Buffers: what modules keep beside their parameters, and what it was when a microbatch's forward read it.

A forward that runs a second time, to recompute, finds the buffers as the first one did: those of spectral norm change
with every forward, and scale the weight. What it writes goes into copies: every microbatch is noted once.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Snapshot = tuple[Tensor | None, ...]
"""What the buffers were at one moment, in their order."""


@dataclass(slots=True)
class _Copied:
    """A buffer as it was last seen, and its copy. `silent`: it changes without being counted, as through `.data`."""

    buffer: Tensor
    version: int
    copy: Tensor
    silent: bool | None = None

    def holds(self, buffer: Tensor) -> bool:
        """Whether the copy is what the buffer is now. The first time that it seems so, the contents are compared."""
        if self.buffer is not buffer or self.version != buffer._version or self.silent:
            return False
        if self.silent is None:
            self.silent = not torch.equal(self.copy, buffer)
        return not self.silent


class Buffers:
    """The buffers of some blocks. Snapshots share the copy of a buffer for as long as nothing changes it."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(module for block in blocks for module in block.modules())
        self._places = [(module._buffers, name) for module in modules for name in module._buffers]
        self._copied: dict[int, _Copied] = {}

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """The buffers now."""
        copies: dict[Tensor, Tensor] = {}  # one that several modules hold is one
        return tuple(self._copy(place, buffers[name], copies) for place, (buffers, name) in enumerate(self._places))

    def _copy(self, place: int, buffer: Tensor | None, copies: dict[Tensor, Tensor]) -> Tensor | None:
        if buffer is None:
            return None
        if buffer not in copies:
            known = self._copied.get(place)
            if known is None or not known.holds(buffer):
                silent = known.silent if known is not None and known.buffer is buffer else None
                known = self._copied[place] = _Copied(buffer, buffer._version, buffer.clone(), silent)
            copies[buffer] = known.copy
        return copies[buffer]

    @contextmanager
    def as_of(self, snapshot: Snapshot) -> Iterator[None]:
        """While it is active, the modules' buffers are copies of a snapshot's; afterwards they are as they were."""
        own = [buffers[name] for buffers, name in self._places]
        copies: dict[int, Tensor] = {}
        for (buffers, name), then in zip(self._places, snapshot, strict=True):
            buffers[name] = None if then is None else copies.setdefault(id(then), then.clone())
        try:
            yield
        finally:
            for (buffers, name), now in zip(self._places, own, strict=True):
                buffers[name] = now
