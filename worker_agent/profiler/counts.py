"""Counts: what every block of a chain does, moves and keeps for one microbatch, found without computing anything.

Blocks run on fake tensors, which have shapes and no contents, as they do when they are measured: each as if it were a
stage of its own, its gradients there already. Equal blocks with equal inputs are run once.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from worker_agent.models.data import Microbatch
from worker_agent.models.losses import Loss
from worker_agent.models.values import Value, as_values, carries_gradient, matching_dtype
from worker_agent.profiler.block_memory import KeptStorages
from worker_agent.profiler.operations import DeviceOperation, GpuKernels, OperationRecorder, foreign_code

UNCOUNTED_ATTRIBUTES = frozenset({"layer_idx", "layer_id"})
"""What Hugging Face's layers hold of their place in the model: it changes nothing that is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """One block and one microbatch. `backward_input` is the part of `backward` that gives the input's gradient alone.

    Bytes are those of BlockMemory; the workspace is what the operations' results take at most beside what is there
    before and after.
    """

    input_bytes: int
    output_bytes: int
    activation_bytes: int
    workspace_bytes: int
    forward: tuple[DeviceOperation, ...]
    backward: tuple[DeviceOperation, ...]
    backward_input: tuple[DeviceOperation, ...]


def count_blocks(
    fake: FakeTensorMode,
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Microbatch,
    *,
    floating: torch.dtype,
    gpu: bool,
) -> tuple[BlockCounts, ...]:
    """Every block's counts. The blocks must have been built under `fake`; of the microbatch only the shapes matter.

    Its floating-point tensors are taken as `floating`. With `gpu` the kernels are a GPU's, else this machine's CPU's.

    Raises InvalidInputError for a block that needs its tensors' contents, or that fails.
    """
    inputs, targets = (_fake(fake, value, floating) for value in microbatch)
    known: dict[Hashable, tuple[BlockCounts, tuple[Tensor, ...]]] = {}
    counts = []
    values = inputs
    with fake:
        for index, block in enumerate(blocks):
            end = (loss, targets) if index == len(blocks) - 1 else None
            key = (_signature(block), tuple(map(_shape, values)), index == 0, end is None)
            if key not in known:
                with _explained(index, block):
                    known[key] = _Run(block=block, inputs=values, first=index == 0, end=end, gpu=gpu).count()
            found, values = known[key]
            counts.append(found)
    return tuple(counts)


@dataclass(slots=True, kw_only=True)
class _Run:
    """One block's passages: one that is counted, and one whose weights want no gradient, for the split backward."""

    block: nn.Module
    inputs: tuple[Tensor, ...]
    first: bool
    end: tuple[Loss, tuple[Tensor, ...]] | None
    gpu: bool

    def count(self) -> tuple[BlockCounts, tuple[Tensor, ...]]:
        """The counts, and the outputs for the next block."""
        trained = [p for p in self.block.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        kept = KeptStorages(self.block)
        recorder = OperationRecorder()
        leaves = self._leaves()
        with self._kernels(), recorder, saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            outputs, roots = self._forward(leaves)
        forward, workspace_bytes = recorder.take(), recorder.peak_bytes - recorder.held_bytes
        activation_bytes = kept.bytes
        kept.forget()
        gradients = [torch.ones_like(root) for root in roots]
        before_bytes = recorder.held_bytes
        recorder.start_peak()
        with recorder:
            _backward(roots, gradients)
        workspace_bytes = max(workspace_bytes, recorder.peak_bytes - max(before_bytes, recorder.held_bytes))
        counts = BlockCounts(
            input_bytes=sum(t.nbytes for t in self.inputs),
            output_bytes=sum(t.nbytes for t in outputs),
            activation_bytes=activation_bytes,
            workspace_bytes=workspace_bytes,
            forward=forward,
            backward=recorder.take(),
            backward_input=self._backward_input(trained),
        )
        return counts, tuple(t.detach() for t in outputs)

    def _backward_input(self, trained: Sequence[nn.Parameter]) -> tuple[DeviceOperation, ...]:
        for parameter in trained:
            parameter.requires_grad_(False)
        with self._kernels():
            _, roots = self._forward(self._leaves())
        gradients = [torch.ones_like(root) for root in roots]
        recorder = OperationRecorder()
        with recorder:
            _backward(roots, gradients)
        for parameter in trained:
            parameter.requires_grad_(True)
        return recorder.take()

    def _leaves(self) -> tuple[Tensor, ...]:
        if self.first:
            return self.inputs
        return tuple(t.detach().requires_grad_(carries_gradient(t)) for t in self.inputs)

    def _forward(self, leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Outputs, and the roots of the graph that carry gradients: the loss is the last block's."""
        result = self.block(*leaves)
        outputs = as_values(result)
        if self.end is None:
            return outputs, tuple(t for t in outputs if carries_gradient(t))
        loss, targets = self.end
        return outputs, (loss(result, targets[0] if len(targets) == 1 else targets),)

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.gpu:
                stack.enter_context(GpuKernels())
            yield


def _backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    pairs = [(root, g) for root, g in zip(roots, gradients, strict=True) if root.requires_grad]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])


def _explained(index: int, block: nn.Module) -> AbstractContextManager[None]:
    """What goes wrong in a block's own code is wrong input."""
    rule = f"must have blocks that run on tensors without contents to be estimated; block {index} does not"
    return foreign_code("model", rule, type(block).__name__)


def _fake(fake: FakeTensorMode, value: Value, floating: torch.dtype) -> tuple[Tensor, ...]:
    with fake:
        return tuple(torch.empty(t.shape, dtype=matching_dtype(t, floating)) for t in as_values(value))


def _shape(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _signature(block: nn.Module) -> Hashable:
    """What two blocks must have in common to do the same: their modules' types, settings and tensors' shapes."""
    parts: list[Hashable] = []
    for name, module in block.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = tuple((key, _shape(tensor), tensor.requires_grad) for key, tensor in tensors)
        parts.append((name, type(module), shapes, _settings(module)))
    return tuple(parts)


def _settings(module: nn.Module) -> Hashable:
    """A module's own attributes: plain values by their text, others by identity, so that only the same are equal."""
    own = {key: value for key, value in vars(module).items() if key not in UNCOUNTED_ATTRIBUTES}
    return tuple((key, _setting(value)) for key, value in own.items() if key not in _OF_EVERY_MODULE)


def _setting(value: Any) -> Hashable:
    plain = isinstance(value, bool | int | float | str | tuple | list | torch.dtype | None)
    return repr(value) if plain else id(value)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
