"""Counts: the operations of every block of a chain for one microbatch, and the bytes that it moves and keeps, without
computing anything.

Blocks run on tensors that have shapes but no contents. They run as in a measurement: each as if it were a stage of its
own, with gradients that already exist. Equal blocks with equal inputs run once.
"""

from collections.abc import Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from pipeplan.documents.forms import Collective, Form
from worker_agent.models.chain import Chain, build_model
from worker_agent.models.data import Microbatch
from worker_agent.models.equality import shape_of, signature
from worker_agent.models.fused import unfused_attention
from worker_agent.models.losses import Loss
from worker_agent.models.parallel import Region
from worker_agent.models.spec import parse_spec
from worker_agent.models.values import as_values, carries_gradient, first_trained, matching_dtype
from worker_agent.profiler.block_memory import KeptStorages, passed_bytes, storage_identity
from worker_agent.profiler.fusion import Fused, fused
from worker_agent.profiler.modules import ModuleOutputs
from worker_agent.profiler.modules import SelectiveCounts as SelectiveCounts
from worker_agent.profiler.operations import (
    DeviceOperation,
    GpuKernels,
    OperationRecorder,
    Sizes,
    Traffic,
    foreign_code,
    fused_attention,
)
from worker_agent.profiler.peers import RecordedPeers
from worker_agent.profiler.times import given


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """The counts of one block for one microbatch. `backward_input` is the part of `backward` that only the input needs.

    Bytes are those of BlockMemory. The workspace is the peak of the operations' results, without those that exist
    before or after. `selective` is attention's core if that keeps tensors of its own, else the majority of operations;
    `modules` are those whose outputs are freed. `expert_matrices` are the shapes of experts' weights together.
    """

    input_bytes: int
    output_bytes: int
    activation_bytes: int
    workspace_bytes: int
    forward: tuple[DeviceOperation, ...]
    backward: tuple[DeviceOperation, ...]
    backward_input: tuple[DeviceOperation, ...]
    forward_collectives: tuple[Collective, ...] = ()
    backward_collectives: tuple[Collective, ...] = ()
    selective: SelectiveCounts | None = None
    modules: SelectiveCounts | None = None
    kept_output_bytes: int = 0
    passed_bytes: int = 0
    expert_matrices: tuple[tuple[int, ...], ...] = ()


def build_shapes(
    spec: str, dtype: torch.dtype, *, gpu: bool, fused: bool = False
) -> tuple[Chain, AbstractContextManager[object]]:
    """The chain that a SPEC names, of tensors without contents, and the mode in which its blocks run.

    A Hugging Face model is on the meta device, where operations take a fraction of the time that they take on fake
    tensors. These stand for a CPU's, whose kernels are others, and have constants, which a user's factory may ask for.
    """
    rule = "must be a model that can be built of tensors without contents to be estimated"
    on_meta = gpu and parse_spec(spec, field="model").is_hugging_face
    mode = torch.device("meta") if on_meta else FakeTensorMode()
    with foreign_code("model", rule, spec), nullcontext() if on_meta else mode:
        return build_model(spec, seed=0, dtype=dtype, empty=on_meta, fused=fused), mode


def count_blocks(
    mode: AbstractContextManager[object],
    blocks: Sequence[nn.Module],
    loss: Loss,
    microbatch: Microbatch,
    *,
    floating: torch.dtype,
    gpu: bool,
) -> tuple[BlockCounts, ...]:
    """Every block's counts. The blocks and their `mode` are those of `build_shapes`, or were built in this mode.

    Of the microbatch only the shapes matter; its floating-point tensors are taken as `floating`. With `gpu` the kernels
    are a GPU's, without it those of this machine's CPU.

    Raises InvalidInputError for a block that needs its tensors' contents, or that fails.
    """
    known: dict[Hashable, tuple[BlockCounts, tuple[Tensor, ...]]] = {}
    counts = []
    with mode:
        values, targets = (
            tuple(torch.empty(t.shape, dtype=matching_dtype(t, floating)) for t in as_values(value))
            for value in microbatch
        )
        first = first_trained(blocks)
        for index, block in enumerate(blocks):
            end = (loss, targets) if index == len(blocks) - 1 else None
            key = (signature(block), tuple(map(shape_of, values)), index > first, end is None)
            if key not in known:
                rule = f"must have blocks that run on tensors without contents to be estimated; block {index} does not"
                with foreign_code("model", rule, type(block).__name__):
                    known[key] = BlockRun(block=block, inputs=values, graded=index > first, end=end, gpu=gpu).count()
            found, values = known[key]
            counts.append(found)
    return tuple(counts)


def recorded_region(form: Form, *, groups: tuple[int, int] = (1, 1)) -> Region[RecordedPeers]:
    return Region(form=form, peers=RecordedPeers(form, groups=groups))


@dataclass(slots=True, kw_only=True)
class BlockRun:
    """One block's passes: forward, the backward without gradients of weights, for the split one, and the whole one.

    With `graded` its inputs get a gradient. `end` is the loss and its targets where the block is the last one. In a
    `region` the block's exchanges are noted by the region's peers. `unfused` attention runs as fused.unfused_attention
    does, on a GPU alone.
    """

    block: nn.Module
    inputs: tuple[Tensor, ...]
    graded: bool
    end: tuple[Loss, tuple[Tensor, ...]] | None
    gpu: bool
    region: Region[RecordedPeers] = field(default_factory=lambda: recorded_region(Form()))
    unfused: bool = False
    fused: bool = False
    _recorder: OperationRecorder = field(default_factory=OperationRecorder, init=False)
    _core_inputs: frozenset[int] = field(default=frozenset(), init=False)
    _core_operations: list[DeviceOperation] = field(default_factory=list, init=False)

    def count(self) -> tuple[BlockCounts, tuple[Tensor, ...]]:
        """The counts, and the outputs for the next block."""
        trained = [p for p in self.block.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        recorder, peers, modules = self._recorder, self.region.peers, ModuleOutputs(recorder=self._recorder)
        kept, core = KeptStorages(self.block), KeptStorages(self.block)

        def pack(tensor: Tensor) -> Any:
            in_core = self._core_inputs and storage_identity(tensor) not in self._core_inputs
            return peers.pack(tensor, core if in_core else kept)

        leaves = tuple(t.detach().requires_grad_(self.graded and carries_gradient(t)) for t in self.inputs)
        kernels: AbstractContextManager[object] = GpuKernels(self._attention) if self.gpu else nullcontext()
        with kernels, recorder, modules.noted(self.block), saved_tensors_hooks(pack, peers.unpack):
            outputs, roots = self._forward(leaves)
        workspace_bytes = recorder.peak_bytes - recorder.held_bytes
        forward_collectives, operations = peers.take(), tuple(self._core_operations)
        selective = SelectiveCounts(operations=operations, activation_bytes=kept.bytes) if operations else None
        activation_bytes = kept.bytes_with(core)
        kept_output_bytes = min(kept.bytes_of(outputs), activation_bytes)
        first, sent = recorder.take(), self._sent(recorder, leaves, outputs)
        saved = {recorder.number(each): each.nbytes() for each in (kept.saved | core.saved).values()}
        kept.forget()
        core.forget()
        backward_input = self._backward_input(trained, roots, leaves, first, sent)
        before_bytes = recorder.held_bytes
        recorder.start_peak()
        _backward(recorder, roots)
        workspace_bytes = max(workspace_bytes, recorder.peak_bytes - max(before_bytes, recorder.held_bytes))
        second = recorder.take()
        counts = BlockCounts(
            input_bytes=sum(t.nbytes for t in self.inputs),
            output_bytes=sum(t.nbytes for t in outputs),
            activation_bytes=activation_bytes,
            kept_output_bytes=kept_output_bytes,
            passed_bytes=passed_bytes(leaves, outputs),
            workspace_bytes=workspace_bytes,
            forward=tuple(each.operation for each in first),
            backward=tuple(each.operation for each in second),
            forward_collectives=forward_collectives,
            backward_collectives=peers.take(),
            selective=selective,
            backward_input=backward_input,
        )
        if self.fused:
            counts = _in_kernels(counts, passes := fused(first, second, saved=saved, sent=sent), saved)
            if not operations and self.end is None:
                again = modules.discarded(first, passes.held(saved), sent, kept_bytes=counts.activation_bytes)
                counts = replace(counts, modules=again)
        if self.gpu and selective is None and self.end is None:
            counts = replace(counts, selective=_by_operation(counts))
        return counts, tuple(t.detach() for t in outputs)

    def _backward_input(
        self,
        trained: Sequence[nn.Parameter],
        roots: Sequence[Tensor],
        leaves: Sequence[Tensor],
        first: Sequence[Traffic],
        sent: Collection[int],
    ) -> tuple[DeviceOperation, ...]:
        """The operations of a backward that computes no gradients of weights. The graph stays as it is."""
        recorder, graded = self._recorder.branch(), [leaf for leaf in leaves if leaf.requires_grad]
        if not graded:
            return ()
        for parameter in trained:
            parameter.requires_grad_(False)
        _backward(recorder, roots, inputs=graded, retain_graph=True)
        for parameter in trained:
            parameter.requires_grad_(True)
        for leaf in graded:
            leaf.grad = None
        self.region.peers.take()
        second = recorder.take()
        if not self.fused:
            return tuple(each.operation for each in second)
        return fused(first, second, saved={}, sent=sent).backward

    def _sent(self, recorder: OperationRecorder, leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> set[int]:
        """The storages of the block's inputs, outputs and weights. The last block outputs only its loss."""
        held = (*self.block.parameters(), *self.block.buffers())
        gradients = [p.grad for p in held if p.grad is not None]
        given_on = outputs if self.end is None else ()
        return {recorder.number(tensor.untyped_storage()) for tensor in (*leaves, *given_on, *held, *gradients)}

    def _forward(self, leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Outputs, and the roots of the graph that carry gradients: the loss is the last block's."""
        result = self.block(*given(self.block, leaves))
        outputs = as_values(result)
        if self.end is None:
            return outputs, tuple(t for t in outputs if carries_gradient(t))
        loss, targets = self.end
        return outputs, (loss(result, targets[0] if len(targets) == 1 else targets),)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """Attention to the whole sequence. Notes separately the operations and tensors of unfused attention."""
        inputs = frozenset(map(storage_identity, (query, key, value)))
        key, value = self.region.ring(key, value)
        if not self.unfused:
            return fused_attention(query, key, value, *args, **options)
        start = len(self._recorder.traffic)
        self._core_inputs = inputs
        output = unfused_attention(query, key, value, *args, **options)
        self._core_inputs = frozenset()
        self._core_operations += [each.operation for each in self._recorder.traffic[start:]]
        return output


def _backward(recorder: OperationRecorder, roots: Sequence[Tensor], **options: Any) -> None:
    graded = [root for root in roots if root.requires_grad]
    gradients = [torch.ones_like(root) for root in graded]
    if graded:
        with recorder:
            torch.autograd.backward(graded, gradients, **options)


def _in_kernels(counts: BlockCounts, passes: Fused, saved: Sizes) -> BlockCounts:
    """The counts with both passes in fused kernels; `saved` are the bytes that the graph keeps of storages."""
    dropped_bytes = sum(saved[each] for each in passes.dropped)
    activation_bytes = counts.activation_bytes + sum(passes.added.values()) - dropped_bytes
    return replace(
        counts,
        forward=passes.forward,
        backward=passes.backward,
        activation_bytes=activation_bytes,
        kept_output_bytes=min(counts.kept_output_bytes, activation_bytes),
        workspace_bytes=passes.workspace_bytes,
    )


def _by_operation(counts: BlockCounts) -> SelectiveCounts | None:
    """Of the products every second one is kept, and so is attention; None for a block without both."""
    products = [op for op in counts.forward if op.sizes and "attention" not in op.name]
    attention = [op for op in counts.forward if op.sizes and "attention" in op.name]
    if not products or not attention:
        return None
    kept_bytes = counts.input_bytes
    for op in (*products[::2], *attention):
        if op.sizes:
            columns = op.sizes.k if op in attention else op.sizes.n
            kept_bytes += op.sizes.batch * op.sizes.m * columns * getattr(torch, op.dtype).itemsize
    return SelectiveCounts(
        operations=(*(op for op in counts.forward if not op.sizes), *products[1::2]),
        activation_bytes=min(kept_bytes, counts.activation_bytes),
        unit="operation",
    )
