"""Block memory: the bytes that a microbatch moves, keeps from forward to backward, and needs in addition.

Kept bytes are those of a block's inputs and of the storages that autograd saves, each counted once, without parameters
and buffers. Every block is counted as if it were a stage of its own: a tensor that one block saves as its output and
the next one as its input counts in both, since the two may be placed on two devices. The bytes that the second one has
in common with the first are also reported as shared. Autocast's copies of weights are counted separately: all
microbatches of a version share them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from worker_agent.engine.backward import Split, parametrizations_of
from worker_agent.engine.graphs import NODE_BYTES, graph_bytes, refuses_hooks
from worker_agent.models.data import Microbatch
from worker_agent.models.losses import Loss
from worker_agent.models.spec import UserCodeError
from worker_agent.models.values import is_dense, parts_of
from worker_agent.profiler.autocast import Autocast
from worker_agent.profiler.times import Around, BlockCrossing, Direction, pass_backward, pass_forward

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """One block's bytes for one microbatch.

    `shared_bytes` is the part of `activation_bytes` that this block does not add on a stage that begins before it: the
    stage has these bytes already, or they are an input that no operation saves. `kept_output_bytes` is the part of
    `output_bytes` that the graph keeps in any case: a send of it needs no other memory. `passed_bytes` is the part that
    is in its inputs' memory. `workspace_bytes` is the peak of the forward or the backward above what is allocated
    before and after it, as the CUDA allocator counts; 0 on a CPU, whose allocator does not count. `cast_bytes` are
    those of the weights' copies under autocast, `graph_bytes` those of the graph itself (`engine.graphs`). `uncounted`:
    the graph keeps more, which cannot be counted.
    """

    input_bytes: int
    output_bytes: int
    activation_bytes: int
    shared_bytes: int = 0
    kept_output_bytes: int = 0
    passed_bytes: int = 0
    workspace_bytes: int
    cast_bytes: int = 0
    graph_bytes: int = 0
    uncounted: bool = False


@dataclass(frozen=True, kw_only=True)
class SplitMemory:
    """One block's bytes for a microbatch whose backward is split: its graph's bytes, as in `BlockMemory`, and the
    gradients of weights that p1 makes.
    """

    split_activation_bytes: int
    split_shared_bytes: int
    split_gradient_bytes: int
    split_graph_bytes: int = 0


def measure_memory(
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Microbatch,
    device: torch.device,
    autocast: Autocast | None = None,
) -> tuple[BlockMemory, ...]:
    """Every block's memory, from an untimed pass. Adds to the gradients, as any pass does."""
    on_gpu = device.type == "cuda"
    workspaces: list[int] = []

    @contextmanager
    def seen(direction: Direction, index: int) -> Iterator[None]:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        before_bytes = torch.cuda.memory_allocated(device) if on_gpu else 0
        yield
        if on_gpu:  # the peak above what is allocated before and after
            settled_bytes = max(before_bytes, torch.cuda.memory_allocated(device))
            peak_bytes = torch.cuda.max_memory_allocated(device)
            workspaces[index] = max(workspaces[index], peak_bytes - settled_bytes)

    def measured(kept: Sequence[KeptStorages]) -> list[BlockMemory]:
        workspaces[:] = [0] * len(blocks)
        return _passed(blocks, loss, microbatch, device, autocast, kept, seen)

    found = _looking_into(blocks, autocast, measured)
    return tuple(replace(each, workspace_bytes=size) for each, size in zip(found, workspaces, strict=True))


def measure_split_memory(
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Microbatch,
    device: torch.device,
    autocast: Autocast | None = None,
) -> tuple[SplitMemory, ...]:
    """Every block's memory in a forward and p1, from an untimed pass. Gradients stay as they are."""
    copies = [autocast.casts[index].copy_of if autocast else None for index in range(len(blocks))]
    trained = [[p for p in block.parameters() if p.requires_grad] for block in blocks]

    def measured(kept: Sequence[KeptStorages]) -> tuple[SplitMemory, ...]:
        pairs = zip(blocks, copies, strict=True)
        splits = [Split(block.parameters(), parametrizations_of([block]), copy_of=copy) for block, copy in pairs]
        gathered = {parameter: parameter.grad for parameters in trained for parameter in parameters}
        for parameter in gathered:
            parameter.grad = None

        def split(direction: Direction, index: int) -> AbstractContextManager[None]:
            return splits[index].active(deferring=direction == "backward")

        found = _passed(blocks, loss, microbatch, device, autocast, kept, split)
        made_bytes = [sum(p.grad.nbytes for p in parameters if p.grad is not None) for parameters in trained]
        for parameter, gradient in gathered.items():
            parameter.grad = gradient
        return tuple(
            SplitMemory(
                split_activation_bytes=each.activation_bytes,
                split_shared_bytes=each.shared_bytes,
                split_gradient_bytes=made,
                split_graph_bytes=each.graph_bytes,
            )
            for each, made in zip(found, made_bytes, strict=True)
        )

    return _looking_into(blocks, autocast, measured)


def _looking_into(
    blocks: Sequence[nn.Module], autocast: Autocast | None, measure: Callable[[Sequence["KeptStorages"]], Found]
) -> Found:
    """The result of `measure` with the saved storages of each block's graph. It runs again without hooks on blocks that
    refuse them.
    """
    closed: set[int] = set()
    while True:
        kept = [
            KeptStorages(block, partial(autocast.kept_copy, index) if autocast else None, closed=index in closed)
            for index, block in enumerate(blocks)
        ]
        try:
            return measure(kept)
        except UserCodeError:
            found = {index for index, block in enumerate(kept) if block.refuses}
            if not found:
                raise
            closed |= found


def _passed(
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Microbatch,
    device: torch.device,
    autocast: Autocast | None,
    kept: Sequence["KeptStorages"],
    around: Around,
) -> list[BlockMemory]:
    """Every block's memory in a pass, without a workspace; `around` is entered around forwards and backwards."""

    @contextmanager
    def noted(direction: Direction, index: int) -> Iterator[None]:
        with around(direction, index), kept[index].noting() if direction == "forward" else nullcontext():
            yield

    crossings = pass_forward(blocks, loss, *microbatch, noted, autocast)
    outputs_of = [*(after.inputs for after in crossings[1:]), ()]  # in the same memory
    shares = _kept_and_shared(kept, [crossing.inputs for crossing in crossings])
    graphs_bytes = _graphs_bytes(kept, crossings, device)
    found = [
        BlockMemory(
            input_bytes=crossing.input_bytes,
            output_bytes=crossing.output_bytes,
            activation_bytes=activations,
            shared_bytes=shared,
            kept_output_bytes=min(block.bytes_of(outputs), activations),  # a tensor may be two outputs
            passed_bytes=passed_bytes(crossing.inputs, outputs),
            workspace_bytes=0,
            cast_bytes=block.cast_bytes,
            graph_bytes=graph,
            uncounted=block.uncounted,
        )
        for block, crossing, outputs, (activations, shared), graph in zip(
            kept, crossings, outputs_of, shares, graphs_bytes, strict=True
        )
    ]
    for block in kept:
        block.forget()
    pass_backward(crossings, noted, autocast)
    return found


def _graphs_bytes(
    blocks: Sequence["KeptStorages"], crossings: Sequence[BlockCrossing], device: torch.device
) -> list[int]:
    """By block, the bytes of its graph, with the views of its inputs at which a stage begins."""
    found = []
    for block, crossing in zip(blocks, crossings, strict=True):
        own_bytes = graph_bytes(crossing.roots, saved=block.tensors, device=device)
        views = sum(tensor.requires_grad for tensor in crossing.inputs) if own_bytes else 0
        found.append(own_bytes + NODE_BYTES * views)
    return found


def _kept_and_shared(blocks: Sequence["KeptStorages"], inputs: Sequence[Sequence[Tensor]]) -> list[tuple[int, int]]:
    """Per block: the bytes that a stage of this block alone keeps, and those shared with the previous block.

    A stage of one block receives each input in memory of its own (the first block reads its inputs), and saves an
    input in that memory. `held` are the storages that a stage with an earlier first block keeps before this block runs:
    those that the previous block saves, and those of its inputs that the stage already kept.
    """
    found = []
    held: set[int] = set()
    for index, (block, given) in enumerate(zip(blocks, inputs, strict=True)):
        entering = block.not_owned(given)
        held = set(entering) if index == 0 else held
        read_bytes = _bytes(entering) if index == 0 else sum(tensor.nbytes for tensor in given)
        kept_bytes = read_bytes + _bytes({key: block.saved[key] for key in block.saved.keys() - entering.keys()})
        added_bytes = _bytes({key: block.saved[key] for key in block.saved.keys() - held})
        kept_bytes = max(kept_bytes, added_bytes)  # a view adds its whole storage
        found.append((kept_bytes, kept_bytes - added_bytes if index else 0))
        held = block.saved.keys() | (entering.keys() & held)
    return found


def passed_bytes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """The bytes of outputs that are views of inputs, at most those of the inputs."""
    own = {storage_identity(tensor) for tensor in inputs}
    passed = sum(tensor.nbytes for tensor in outputs if storage_identity(tensor) in own)
    return min(passed, sum(tensor.nbytes for tensor in inputs))


def _memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors of which a tensor consists; on the meta device those that it would consist of."""
    return (tensor,) if tensor.is_meta and is_dense(tensor) else parts_of(tensor) or ()


def _bytes(storages: Mapping[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


class KeptStorages:
    """The storages that one block's graph saves, by identity, which distinguishes fake tensors' storages, too.

    `tensors` is the number of saved tensors. `is_copy` recognises the copies of weights, which are counted separately.
    `uncounted`: the graph also saves memory that torch does not report, or the block is `closed`: its forward allows no
    hooks on saved tensors. `refuses`: hooks were tried, and the forward failed.
    """

    def __init__(
        self, block: nn.Module, is_copy: Callable[[Tensor], bool] | None = None, *, closed: bool = False
    ) -> None:
        own = (part for tensor in (*block.parameters(), *block.buffers()) for part in _memory_of(tensor))
        self._owned = set(map(storage_identity, own))
        self._is_copy = is_copy
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._closed = closed
        self.saved: dict[int, torch.UntypedStorage] = {}
        self.tensors = 0
        self.uncounted = closed
        self.refuses = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While it is active, notes a graph's saved tensors."""
        if self._closed:
            yield
            return
        try:
            with saved_tensors_hooks(self.pack, lambda tensor: tensor):
                yield
        except RuntimeError as error:
            self.refuses = refuses_hooks(error)
            raise

    @property
    def bytes(self) -> int:
        return _bytes(self.saved)

    @property
    def cast_bytes(self) -> int:
        return _bytes(self._copies)

    def not_owned(self, tensors: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
        """The storages of these tensors, without parameters and buffers."""
        parts = [part for tensor in tensors for part in _memory_of(tensor)]
        pairs = ((storage_identity(part), part.untyped_storage()) for part in parts)
        return {identity: storage for identity, storage in pairs if identity not in self._owned}

    def bytes_of(self, outputs: Sequence[Tensor]) -> int:
        """The bytes of those outputs that are in these storages, and are sent from there: a copy is sent of others."""
        sent = (t for t in outputs if t.is_contiguous() and not (t.is_conj() or t.is_neg()))
        return sum(t.nbytes for t in sent if storage_identity(t) in self.saved)

    def bytes_with(self, other: "KeptStorages") -> int:
        """The bytes of both, a storage of both once."""
        return _bytes(self.saved | other.saved)

    def pack(self, tensor: Tensor) -> Tensor:
        """Notes a saved tensor. The graph gets it detached: an output that saves itself would never be freed."""
        self.uncounted = self.uncounted or parts_of(tensor) is None
        copied = self._is_copy is not None and tensor.layout is torch.strided and self._is_copy(tensor)
        found = self.not_owned((tensor,))
        (self._copies if copied else self.saved).update(found)
        self.tensors += bool(found)
        return tensor.detach()

    def forget(self) -> None:
        """Releases the storages. Until then they stay alive: no identity is used twice while they are counted."""
        self.saved, self._copies = {}, {}


def storage_identity(tensor: Tensor) -> int:
    """The identity of a dense tensor's storage while the storage lives. Fake storages have no address, but have this.

    Of a tensor without a storage of its own: the tensor's identity.
    """
    identity: int = tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else id(tensor)
    return identity
