"""Notice: announces a message between stages, and carries its tensors if they are small."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_BYTES = 16
"""The head of a notice: two whole numbers. Tensors in it start at multiples of this size, which suits every type."""

Sizes = tuple[int, ...]
"""The bytes of a message's tensors."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def on(self, memory: Tensor) -> Tensor:
        """A tensor over some bytes of memory. It is no view of them: its version counts only its own changes."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), 0, self.shape)  # type: ignore[call-overload,no-any-return]


Layouts = tuple[Layout, ...]


def layouts_of(tensors: Iterable[Tensor]) -> Layouts:
    return tuple(Layout(tuple(t.shape), t.dtype) for t in tensors)


@dataclass(frozen=True, slots=True)
class Known:
    """The content of a message: `layouts`, which have a `number` on the edge, and the `sizes` of its tensors in bytes.

    `riding_bytes` is the space that all of its tensors take in a notice.
    """

    number: int
    layouts: Layouts
    sizes: Sizes
    riding_bytes: int

    @staticmethod
    def of(number: int, layouts: Layouts) -> "Known":
        """Layouts under a number."""
        sizes = tuple(layout.bytes for layout in layouts)
        return Known(number, layouts, sizes, sum(map(_aligned, sizes)))


def _aligned(size: int) -> int:
    return -(-size // HEAD_BYTES) * HEAD_BYTES


class Notice:
    """A notice's memory, reused for every message: the layout's number and the bytes of its description, then
    `riding_bytes` for tensors.
    """

    def __init__(self, riding_bytes: int) -> None:
        self.riding_bytes = riding_bytes
        self.memory = torch.empty(HEAD_BYTES + riding_bytes, dtype=torch.uint8)
        self.head = memoryview(self.memory[:HEAD_BYTES].numpy().data).cast("q")
        self._places: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def places(self, known: Known) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The bytes that a notice with such tensors takes, and the tensors in them."""
        found = self._places.get(known.number)
        if found is None:
            start, tensors = HEAD_BYTES, list[Tensor]()
            for layout in known.layouts:
                bytes_ = self.memory[start : start + layout.bytes]
                tensors.append(bytes_.view(layout.dtype).view(layout.shape))
                start += _aligned(layout.bytes)
            found = self._places[known.number] = self.memory[:start], tuple(tensors)
        return found
