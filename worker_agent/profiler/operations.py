"""Operations: what a stretch of a model makes a device do, recorded while fake tensors pass it.

An operation is one call of a kernel. Its floating-point operations come from torch's own formulas (matrix products,
convolutions, attention; 0 for others), its bytes are those that must move at least: every tensor that it takes is read
once, every tensor that it gives is written once. A view moves nothing.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from worker_agent.profiler.memory import storage_identity

aten = torch.ops.aten

_NOT_WRITTEN = frozenset(
    {
        aten.empty,
        aten.empty_like,
        aten.empty_permuted,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
    }
)
"""They only take memory: nothing is launched."""

_OVERWRITING = frozenset({aten.copy_, aten.fill_, aten.zero_, aten.bernoulli_, aten.normal_, aten.uniform_})
"""They write their first argument without reading it."""

_SELECTING = frozenset({aten.embedding, aten.gather, aten.index, aten.index_select, aten.nll_loss_forward})
"""They read as much of their first argument as they write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A kernel's name, its floating-point operations, the dtype in which it does them, and the bytes that it moves."""

    name: str
    flops: int
    dtype: str
    moved_bytes: int


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes are untyped
    """Notes every operation that runs under it, and what memory their results take meanwhile.

    Memory counts storages that operations made under it, while they live: `held_bytes` now, `peak_bytes` the most since
    `start_peak` was called.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.held_bytes = 0
        self.peak_bytes = 0
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def start_peak(self) -> None:
        """Forgets the peak: what is held now is the most from here on."""
        self.peak_bytes = self.held_bytes

    def take(self) -> tuple[Operation, ...]:
        """The operations since the last call."""
        taken, self.operations = tuple(self.operations), []
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and notes it."""
        result = func(*args, **(kwargs or {}))
        results = _tensors(result)
        if func.namespace == "prim" or not results:
            return result
        taken = _tensors((args, kwargs))
        fresh = [t for t in results if not any(storage_identity(t) == storage_identity(other) for other in taken)]
        for tensor in fresh:
            self._hold(tensor.untyped_storage())
        written = results if func._schema.is_mutable else fresh
        if written and func.overloadpacket not in _NOT_WRITTEN:
            self.operations.append(_operation(func.overloadpacket, args, kwargs or {}, result, taken, written))
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        address, size_bytes = storage._cdata, storage.nbytes()
        if address in self._made:
            return

        def release(_: object) -> None:
            self.held_bytes -= size_bytes
            self._made.pop(address, None)

        self._made[address] = weakref.ref(storage, release)
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def _operation(
    kernel: Any, args: Any, kwargs: Any, result: Any, taken: Sequence[Tensor], written: Sequence[Tensor]
) -> Operation:
    flops = _flops(kernel, args, kwargs, result)
    return Operation(
        name=str(kernel).removeprefix("aten."),
        flops=flops,
        dtype=str(next(t.dtype for t in (*taken, *written))).removeprefix("torch."),
        moved_bytes=_read_bytes(kernel, taken, written) + _distinct_bytes(written),
    )


def _flops(kernel: Any, args: Any, kwargs: Any, result: Any) -> int:
    """By torch's formulas; attention's kernel for CPUs, which they leave out, has those of a GPU's."""
    if kernel is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))  # type: ignore[no-untyped-call]
    if kernel is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        shapes = (t.shape for t in args[:4])
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    formula = flop_registry.get(kernel)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _read_bytes(kernel: Any, taken: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    if kernel in _OVERWRITING:
        return _distinct_bytes(taken[1:])
    if kernel in _SELECTING:
        return _distinct_bytes(taken[1:]) + _distinct_bytes(written)
    return _distinct_bytes(taken)


def _distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of these tensors, each once, and of an expanded one only what there is."""
    seen = {(storage_identity(t), t.storage_offset(), tuple(t.shape), tuple(t.stride())): t for t in tensors}
    return sum(_own_bytes(tensor) for tensor in seen.values())


def _own_bytes(tensor: Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
