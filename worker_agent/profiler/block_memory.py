"""Block memory: what a microbatch moves, what it keeps from forward to backward, and what it needs on top.

Kept bytes are the storages that autograd saves, each counted once, without those of parameters and buffers. Every
block is counted as if it were a stage of its own: a tensor that a block saves as its output and the next one as its
input counts in both, since they may come to be on two devices.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

    `workspace_bytes` is the peak above what is there before and after, in the forward or the backward, by the CUDA
    allocator's account; 0 on a CPU, which keeps none.
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

    @contextmanager
    def seen(direction: Direction, index: int) -> Iterator[None]:
        hooks = saved_tensors_hooks(kept[index].pack, _unpack)
        with _transient(device, workspaces, index):
            if direction == "forward":
                with hooks:
                    yield
            else:
                yield

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
    """The storages that one block's graph saves. Tensors may be fake: storages are told apart by what they are."""

    def __init__(self, block: nn.Module) -> None:
        self._owned = {storage_identity(tensor) for tensor in (*block.parameters(), *block.buffers())}
        self._saved: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        """Their bytes: whole storages, since a view keeps all that it looks at."""
        return sum(storage.nbytes() for storage in self._saved.values())

    def pack(self, tensor: Tensor) -> Tensor:
        """Notes a saved tensor. What goes into the graph is detached: an output that saved itself would never go."""
        if storage_identity(tensor) not in self._owned:
            self._saved[storage_identity(tensor)] = tensor.untyped_storage()
        return tensor.detach()

    def forget(self) -> None:
        """Lets go of the storages: noted ones stay alive, so that no identity is used twice while they are counted."""
        self._saved = {}


def storage_identity(tensor: Tensor) -> int:
    """Which storage it looks at, while that is there. Fake storages have no address, but this."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _transient(device: torch.device, peaks: list[int], index: int) -> Iterator[None]:
    """Raises peaks[index] to the peak above what is allocated before and after."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield
    settled = max(before, torch.cuda.memory_allocated(device))
    peaks[index] = max(peaks[index], torch.cuda.max_memory_allocated(device) - settled)
