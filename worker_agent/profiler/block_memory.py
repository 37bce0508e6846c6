"""Block memory: what a microbatch moves, what it keeps from forward to backward, and what it needs on top.

Kept bytes are those of the storages that autograd saves, each counted once, without parameters and buffers. Every block
is counted as if it were a stage of its own: a tensor that one block saves as its output and the next one as its input
counts in both, since the two may be placed on two devices.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from worker_agent.models.data import Microbatch
from worker_agent.models.losses import Loss
from worker_agent.profiler.times import Direction, pass_backward, pass_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """One block's bytes for one microbatch.

    `workspace_bytes` is the peak of the forward or the backward above what is allocated before and after it, as the
    CUDA allocator counts; 0 on a CPU, whose allocator does not count.
    """

    input_bytes: int
    output_bytes: int
    activation_bytes: int
    workspace_bytes: int


def measure_memory(
    blocks: Sequence[nn.Module], loss: Loss, microbatch: Microbatch, device: torch.device
) -> tuple[BlockMemory, ...]:
    """Every block's memory, from one untimed passage. Adds to the gradients, as any passage does."""
    kept = [KeptStorages(block) for block in blocks]
    workspaces = [0] * len(blocks)
    on_gpu = device.type == "cuda"

    @contextmanager
    def seen(direction: Direction, index: int) -> Iterator[None]:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        before_bytes = torch.cuda.memory_allocated(device) if on_gpu else 0
        with ExitStack() as stack:
            if direction == "forward":
                stack.enter_context(saved_tensors_hooks(kept[index].pack, lambda tensor: tensor))
            yield
        if on_gpu:  # the peak above what is allocated before and after
            settled_bytes = max(before_bytes, torch.cuda.memory_allocated(device))
            peak_bytes = torch.cuda.max_memory_allocated(device)
            workspaces[index] = max(workspaces[index], peak_bytes - settled_bytes)

    crossings = pass_forward(blocks, loss, *microbatch, seen)
    moved_bytes = [(crossing.input_bytes, crossing.output_bytes) for crossing in crossings]
    kept_bytes = [block.bytes for block in kept]
    for block in kept:
        block.forget()
    pass_backward(crossings, seen)
    return tuple(
        BlockMemory(input_bytes=inputs, output_bytes=outputs, activation_bytes=activations, workspace_bytes=workspace)
        for (inputs, outputs), activations, workspace in zip(moved_bytes, kept_bytes, workspaces, strict=True)
    )


class KeptStorages:
    """The storages that one block's graph saves. Tensors may be fake: storages are told apart by identity."""

    def __init__(self, block: nn.Module) -> None:
        self._owned = {storage_identity(tensor) for tensor in (*block.parameters(), *block.buffers())}
        self._saved: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        """Their bytes. A view keeps its whole storage."""
        return sum(storage.nbytes() for storage in self._saved.values())

    def bytes_with(self, other: "KeptStorages") -> int:
        """The bytes of both, a storage of both once."""
        return sum(storage.nbytes() for storage in (self._saved | other._saved).values())

    def pack(self, tensor: Tensor) -> Tensor:
        """Notes a saved tensor. The graph gets it detached: an output that saves itself would never be freed."""
        if storage_identity(tensor) not in self._owned:
            self._saved[storage_identity(tensor)] = tensor.untyped_storage()
        return tensor.detach()

    def forget(self) -> None:
        """Releases the storages. Until then they stay alive: no identity is used twice while they are counted."""
        self._saved = {}


def storage_identity(tensor: Tensor) -> int:
    """The identity of a tensor's storage while the storage lives. Fake storages have no address, but they have this."""
    identity: int = tensor.untyped_storage()._cdata
    return identity
