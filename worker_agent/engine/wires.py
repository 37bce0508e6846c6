"""Wires: move single tensors between two ranks. Lines choose an edge's wires, channels make messages of tensors."""

from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """A transfer in progress."""

    def wait(self) -> object:
        """Waits until it has completed; on a GPU, makes work that is enqueued later wait for it."""


Posted = tuple[Work | None, Tensor]
"""A transfer with its tensor, which must be kept until the transfer has completed."""


class Wire(Protocol):
    """Moves tensors between this rank and another one, in order for each tag. No call waits."""

    def send(self, tensor: Tensor, target: int, tag: int) -> Work | None:
        """Starts to send."""

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work | None:
        """Starts to receive into the tensor."""


class GroupWire:
    """A process group of torch as a wire, called directly: `isend` and `irecv` would repeat needless checks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}

    def send(self, tensor: Tensor, target: int, tag: int) -> Work | None:
        return self._group.send([tensor], self._places[target], tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work | None:
        return self._group.recv([tensor], self._places[source], tag)
