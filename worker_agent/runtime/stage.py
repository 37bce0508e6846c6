"""Stage: the blocks of one worker, and what it keeps of each microbatch from forward to backward.

A block takes and returns one tensor or a tuple of tensors.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from worker_agent.runtime.backward import Added, Deferred, Split, add_weight_gradients
from worker_agent.runtime.statistics import MinibatchStatistics, nothing_noted

Tensors = tuple[Tensor, ...]
Criterion = Callable[[Any, Any], Tensor]


@dataclass(slots=True)
class Kept:
    """What one microbatch keeps: its inputs (leaves of its graph), its targets, and the graph's roots by their edges.

    A root stands for a floating-point output, None where nothing trainable leads to it. The outputs themselves are not
    kept: the next stage has them, and the backward needs their place in the graph only. `split` is there where the
    backward is split in two.
    """

    inputs: Tensors
    targets: Any = None
    roots: list[Any] = field(default_factory=list)
    split: Split | None = None

    def splitting(self, *, deferring: bool) -> AbstractContextManager[None]:
        """What is to be active in the forward with a graph and, deferring, in the backward."""
        return self.split.active(deferring=deferring) if self.split else nullcontext()


class Stage:
    """Blocks [first_block, first_block + len(blocks)) of a model, the last ones with the criterion.

    The random state is set from (seed, microbatch, block) before every block: a dropout mask belongs to the
    microbatch and the block, whoever computes it and how often, so that recomputation, resumption and any partition
    give the same. What modules note about the data is noted once a microbatch; with `minibatch_statistics` batch norm's
    running statistics are those of minibatches.
    With `autocast` blocks and criterion compute in that type what torch computes in it.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        first_block: int,
        criterion: Criterion | None,
        recompute: bool,
        seed: int,
        device: torch.device,
        split_backward: bool = False,
        concatenate: bool = False,
        minibatch_statistics: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.blocks = tuple(blocks)
        self.criterion = criterion
        self.recompute = recompute
        self.kept: dict[int, Kept] = {}
        self.deferred: dict[int, list[Deferred]] = {}
        self.activation_bytes = 0
        self.weight_gradient_bytes: int | None = None
        self._split_backward = split_backward
        self._concatenate = concatenate
        self._statistics = MinibatchStatistics(self.blocks) if minibatch_statistics else None
        self._autocast = autocast
        self._device = device
        self._changes_inputs: bool | None = None
        self._measured = False
        self._places = [(m._parameters, name) for block in blocks for m in block.modules() for name in m._parameters]
        self._first_block = first_block
        self._seed = seed
        self._generator = _default_generator(device)

    def forward(self, microbatch: int, inputs: Tensors, targets: Any = None) -> Tensors:
        """The stage's outputs, or its loss if it has the criterion. Keeps the graph, with recompute the inputs."""
        kept = self.kept[microbatch] = Kept(inputs, targets)
        with self._statistics.noting() if self._statistics else nullcontext():
            if self.recompute:
                return self._run_without_graph(microbatch, kept)
            return self._run_with_graph(microbatch, kept)

    def recompute_forward(self, microbatch: int) -> None:
        """Runs the forward again from the kept inputs, with the same random state, and keeps the graph."""
        with nothing_noted(self.blocks):
            self._run_with_graph(microbatch, self.kept[microbatch])

    def backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        """Adds to the weights' gradients; returns those of the floating-point inputs, in memory of their own.

        `gradients` holds one tensor for every floating-point output.
        """
        kept = self.kept.pop(microbatch)
        reached = [(root, g) for root, g in zip(kept.roots, gradients, strict=True) if root is not None]
        if reached:
            with kept.splitting(deferring=True):
                torch.autograd.backward([root for root, _ in reached], [gradient for _, gradient in reached])
        if kept.split:
            self._defer(microbatch, kept.split.deferred)
        given = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        return tuple(_gradient_of(t, given) for t in kept.inputs if t.is_floating_point())

    def waiting(self, microbatches: Iterable[int]) -> Counter[nn.Parameter]:
        """How often something is still to be added to each gradient that these microbatches' backwards left out."""
        return Counter(parameter for k in microbatches for call in self.deferred[k] for parameter in call.parameters())

    def backward_weight(self, microbatches: Iterable[int], added: Added = lambda _: None) -> None:
        """Adds what the backwards of these microbatches left out, and keeps nothing of them any more.

        `added` is called as often for every parameter as `waiting` has counted.
        """
        deferred = [self.deferred.pop(k) for k in microbatches]
        add_weight_gradients(deferred, concatenate=self._concatenate, added=added)

    def reduce_statistics(self, group: dist.ProcessGroup) -> None:
        """Makes the replicas' minibatch statistics one, where there are any."""
        if self._statistics:
            self._statistics.merge(group)

    def end_minibatch(self) -> None:
        """Moves running statistics on, where they are those of minibatches."""
        if self._statistics:
            self._statistics.end_minibatch()

    def kept_storages(self, microbatch: int) -> frozenset[int]:
        """The addresses of the memory that the microbatch's weight gradients still need."""
        return frozenset(address for call in self.deferred.get(microbatch, ()) for address in call.storages())

    def _defer(self, microbatch: int, deferred: list[Deferred]) -> None:
        self.deferred[microbatch] = deferred
        if self.weight_gradient_bytes is None:
            storages = {address: size for call in deferred for address, size in call.storages().items()}
            owned = self._owned_storages()
            self.weight_gradient_bytes = sum(size for address, size in storages.items() if address not in owned)

    def _parameters(self) -> Iterable[nn.Parameter]:
        """Those of the version in use, each once."""
        held = (held[name] for held, name in self._places)
        return {id(parameter): parameter for parameter in held if parameter is not None}.values()

    def _owned_storages(self) -> set[int]:
        return {t.untyped_storage().data_ptr() for b in self.blocks for t in (*b.parameters(), *b.buffers())}

    @torch.no_grad()
    def _run_without_graph(self, microbatch: int, kept: Kept) -> Tensors:
        """Runs on copies of the inputs if blocks change these in place: they are to be recomputed from."""
        if self._changes_inputs is False:
            return self._run(microbatch, kept)
        copies = tuple(t.clone() for t in kept.inputs)
        outputs = self._run(microbatch, Kept(copies, kept.targets))
        self._changes_inputs = any(t._version for t in copies)
        return outputs

    def _run_with_graph(self, microbatch: int, kept: Kept) -> Tensors:
        kept.split = Split(self._parameters()) if self._split_backward else None
        with kept.splitting(deferring=False):
            outputs = self._measure(microbatch, kept) if not self._measured else self._run(microbatch, kept)
        floating = [t for t in outputs if t.is_floating_point()]
        kept.roots = [get_gradient_edge(t) if t.requires_grad else None for t in floating]
        return tuple(t.detach() for t in outputs)

    def _run(self, microbatch: int, kept: Kept) -> Tensors:
        if self._autocast is None:
            return self._run_blocks(microbatch, kept)
        with torch.autocast(self._device.type, self._autocast):
            return self._run_blocks(microbatch, kept)

    def _run_blocks(self, microbatch: int, kept: Kept) -> Tensors:
        values: Any = tuple(_changeable(t) for t in kept.inputs)
        for i, block in enumerate(self.blocks):
            self._generator.manual_seed(random_seed(self._seed, microbatch, self._first_block + i))
            result = block(*values)
            values = result if isinstance(result, tuple) else (result,)
        if self.criterion is None:
            return tuple(values)
        return (self.criterion(values if len(values) > 1 else values[0], kept.targets),)

    def _measure(self, microbatch: int, kept: Kept) -> Tensors:
        """Runs once with every saved tensor seen, to count what a microbatch keeps (storages, without the weights)."""
        owned = self._owned_storages()
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        for tensor in kept.inputs:
            pack(tensor)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self._run(microbatch, kept)
        self.activation_bytes = sum(saved.values())
        self._measured = True
        return outputs


def _changeable(leaf: Tensor) -> Tensor:
    """The tensor as one that a block may change in place: no leaf of the graph, in the same memory."""
    return torch.ops.aten._unsafe_view(leaf, leaf.shape) if leaf.requires_grad and torch.is_grad_enabled() else leaf


def _gradient_of(leaf: Tensor, given: set[int]) -> Tensor:
    """A leaf's gradient. Through views alone it is a view of what was given, whose memory is used again."""
    if leaf.grad is None:
        return torch.zeros_like(leaf)
    return leaf.grad.clone() if leaf.grad.untyped_storage().data_ptr() in given else leaf.grad


def random_seed(seed: int, microbatch: int, block: int) -> int:
    """A 63-bit seed for one block's work on one microbatch."""
    return hash((seed, microbatch, block)) & (2**63 - 1)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
