"""Channels: tensors from stage to stage. Every directed edge and kind is first in, first out, by itself.

With gloo all edges are in the group of all ranks, in which their messages bear a tag: a further group has connections,
and threads that wake up a hundred times a second. NCCL knows no tags: there every edge has a group.

The first activation on an edge is preceded by a header that says how many tensors, their shapes and types; after it
both sides know what comes, receives are posted ahead into buffers that are allocated once and used again.
"""

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RECEIVES_AHEAD = 2


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A directed edge between two ranks; activations and gradients have edges of their own.

    So has every `stage` of the sender: ranks that hold several send each other tensors of several shapes.
    """

    source: int
    target: int
    gradients: bool
    stage: int = 0

    @property
    def tag(self) -> int:
        """What tells its messages from those of other edges between the two ranks."""
        return 2 * self.stage + self.gradients


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def layouts_of(tensors: Iterable[Tensor]) -> tuple[Layout, ...]:
    """The layouts of a message's tensors."""
    return tuple(Layout(tuple(t.shape), t.dtype) for t in tensors)


def open_groups(edges: Iterable[Edge], rank: int) -> dict[Edge, dist.ProcessGroup]:
    """The process groups of the edges that touch a rank. Every rank makes all groups, in the same order."""
    nccl = dist.get_backend() == "nccl"
    made = {
        edge: dist.new_group([edge.source, edge.target], group_desc=str(edge)) if nccl else dist.group.WORLD
        for edge in sorted(edges)
    }
    return {edge: group for edge, group in made.items() if group is not None and rank in (edge.source, edge.target)}


class Outbox:
    """The sending end of an edge. A send never waits; its tensors are held until they are through.

    gloo cannot be asked whether a send is through, only be waited for. But of the messages between two stages, in
    either direction, no more than `window` can be under way: the most microbatches that the earlier stage ever has in
    flight. Whatever was sent before those has arrived, and waiting for it takes no time.
    """

    def __init__(self, edge: Edge, group: dist.ProcessGroup, *, header: bool, window: int) -> None:
        self._edge = edge
        self._group = group
        self._header_due = header
        self._window = window
        self._pending: deque[list[tuple[dist.Work | None, Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Hands the tensors over, in order."""
        message = []
        if self._header_due:
            message += [self._post(tensor) for tensor in self._header(layouts_of(tensors))]
            self._header_due = False
        self._pending.append(message + [self._post(tensor.detach().contiguous()) for tensor in tensors])
        while len(self._pending) > self._window:
            self._finish_oldest()

    def flush(self) -> None:
        """Waits until all that was sent is through."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for work, _ in self._pending.popleft():
            if work is not None:
                work.wait()

    def _header(self, layouts: tuple[Layout, ...]) -> tuple[Tensor, Tensor]:
        content = torch.frombuffer(bytearray(pickle.dumps(layouts)), dtype=torch.uint8)
        size = torch.tensor([content.numel()], dtype=torch.int64)
        return _on(size, self._group), _on(content, self._group)

    def _post(self, tensor: Tensor) -> tuple[dist.Work | None, Tensor]:
        return dist.isend(tensor, self._edge.target, group=self._group, tag=self._edge.tag), tensor


class Inbox:
    """The receiving end of an edge for a known number of messages. Receives are posted ahead once shapes are known."""

    def __init__(self, edge: Edge, group: dist.ProcessGroup, *, messages: int, device: torch.device) -> None:
        self._edge = edge
        self._group = group
        self._device = device
        self._unposted = messages
        self._layouts: tuple[Layout, ...] | None = None
        self._posted: deque[list[tuple[dist.Work | None, Tensor]]] = deque()
        self._free: list[list[Tensor]] = []

    def expect(self, layouts: tuple[Layout, ...]) -> None:
        """Says what every message holds, where that is known without a header."""
        if self._layouts is None:
            self._layouts = layouts
            self._post_ahead()

    def receive(self) -> list[Tensor]:
        """Waits for the next message. Its tensors are buffers: `release` gives them back."""
        if self._layouts is None:
            self.expect(self._receive_header())
        message = self._posted.popleft()
        for work, _ in message:
            if work is not None:
                work.wait()
        self._post_ahead()
        return [tensor for _, tensor in message]

    def release(self, tensors: list[Tensor]) -> None:
        """Gives a message's buffers back to be used again."""
        self._free.append(tensors)

    def _post_ahead(self) -> None:
        while self._unposted and len(self._posted) < RECEIVES_AHEAD:
            tensors = self._free.pop() if self._free else [lay.empty(self._device) for lay in self._layouts or ()]
            self._posted.append([(self._post(t), t) for t in tensors])
            self._unposted -= 1

    def _post(self, tensor: Tensor) -> dist.Work | None:
        return dist.irecv(tensor, self._edge.source, group=self._group, tag=self._edge.tag)

    def _receive_header(self) -> tuple[Layout, ...]:
        size = _on(torch.empty(1, dtype=torch.int64), self._group)
        dist.recv(size, self._edge.source, group=self._group, tag=self._edge.tag)
        content = _on(torch.empty(int(size.item()), dtype=torch.uint8), self._group)
        dist.recv(content, self._edge.source, group=self._group, tag=self._edge.tag)
        layouts: Any = pickle.loads(content.cpu().numpy().tobytes())
        return tuple(layouts)


def _on(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor where the group's backend can send it from."""
    return tensor.cuda() if dist.get_backend(group) == "nccl" else tensor
