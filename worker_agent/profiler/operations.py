"""Operations: the kernels that a part of a model runs on a device, recorded while fake tensors pass through it.

An operation is one call of a kernel. Its floating-point operations come from torch's own formulas (matrix products,
convolutions, attention; 0 for others). Its bytes are a lower bound on traffic: every input is read once, every result
is written once. A view moves nothing.

On a machine without a GPU, fake tensors take a CPU's kernels. On a GPU three things differ by more than speed: dropout
keeps a mask of one byte for each element, attention does not keep the matrix of scores, and both are one kernel, and
several on a CPU. GpuKernels makes these calls take the GPU's kernels on any machine.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pipeplan.errors import InvalidInputError, PipeplanError
from worker_agent.models.fused import FLASH_HEAD, rms_norm
from worker_agent.models.spec import UserCodeError, described
from worker_agent.models.values import is_dense, parts_of
from worker_agent.profiler.block_memory import storage_identity

aten = torch.ops.aten

FLASH_DTYPES = (torch.float16, torch.bfloat16)
MOST_COPIED_BYTES = 16
"""The largest asynchronous copy from a GPU's memory to a multiprocessor's (NVIDIA, "Parallel
Thread Execution ISA" 8.0, `cp.async`: 4, 8 or 16 bytes, at a multiple of as many).
"""

_NOT_WRITTEN = frozenset(
    {
        *(aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided),
        *(aten.new_empty, aten.new_empty_strided),
    }
)
"""Calls that only take memory: no kernel is launched."""

_OVERWRITING = frozenset({aten.copy_, aten.fill_, aten.zero_, aten.bernoulli_, aten.normal_, aten.uniform_})
"""Calls that write their first argument without reading it."""

_FIRST_OPERAND = {
    aten.mm: 0,
    aten.addmm: 1,
    aten.bmm: 0,
    aten.baddbmm: 1,
    aten._grouped_mm: 0,
    torch.ops.pipeplan.heads_product: 0,
}
"""Where a product's two matrices stand among its arguments."""

_QUERY = {
    aten._scaled_dot_product_flash_attention: 0,
    aten._scaled_dot_product_flash_attention_backward: 1,
    aten._scaled_dot_product_efficient_attention: 0,
    aten._scaled_dot_product_efficient_attention_backward: 1,
    aten._scaled_dot_product_flash_attention_for_cpu: 0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}
"""Where query and key of an attention kernel stand among its arguments."""

_SELECTING = frozenset({aten.embedding, aten.gather, aten.index, aten.index_select, aten.nll_loss_forward})
"""Calls that read as much of their first argument as they write."""

_BY_ROW = frozenset({aten.nll_loss_forward})
"""Of these, those that read as much of every row as they write."""

_APART = frozenset(
    {
        *(aten.embedding_dense_backward, aten.index_put, aten.index_add),
        *(aten.scatter, aten.scatter_add, aten.scatter_reduce),
        *(aten.sort, aten.topk, aten.cumsum, aten.bincount, aten.nonzero, aten.histc),
    }
)
"""Calls that are kernels of their own: they sort, count, or write where their contents say."""


@contextmanager
def foreign_code(field: str, rule: str, value: object) -> Iterator[None]:
    """Converts errors of the user's code to an InvalidInputError: the rule, and in brackets the cause in one line."""
    try:
        yield
    except UserCodeError as error:
        raise InvalidInputError(field, f"{rule} ({error})", value) from error
    except PipeplanError:
        raise
    except Exception as error:  # a model, its data and its loss are the user's: anything may be raised
        raise InvalidInputError(field, f"{rule} ({described(error)})", value) from error


class GpuKernels(TorchFunctionMode):
    """A mode in which dropout, torch's RMS norm and scaled dot-product attention call a GPU's kernels.

    `attention` computes attention: by default the kernel that torch prefers.
    """

    def __init__(self, attention: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.attention = attention or fused_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, or the GPU's kernel in its place."""
        if func is functional.dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is functional.rms_norm:
            return _rms_norm(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return functional.dropout(input, p, training, inplace)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is None or weight.dim() != 1:
        return functional.rms_norm(input, normalized_shape, weight, eps)
    return rms_norm(input, weight, torch.finfo(input.dtype).eps if eps is None else eps)[0]  # type: ignore[no-any-return]


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that torch prefers: flash for 16 bits without a mask, memory-efficient for others, else plain."""
    fits = query.dim() == 4 and query.shape[-1] <= FLASH_HEAD and query.shape[-1] == value.shape[-1]
    if fits and attn_mask is None and query.dtype in FLASH_DTYPES:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if query.dim() == 4 and query.dtype != torch.float64 and query.shape[1] == key.shape[1]:
        bias = None
        if attn_mask is not None:  # as an addend of the scores, expanded to their shape
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
            bias = attn_mask.expand((*query.shape[:-1], key.shape[-2]))
        efficient = aten._scaled_dot_product_efficient_attention
        found = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
        return found[0]  # type: ignore[no-any-return]
    plain = aten._scaled_dot_product_attention_math
    arguments = {"scale": scale, "enable_gqa": enable_gqa}
    return plain(query, key, value, attn_mask, dropout_p, is_causal, **arguments)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSizes:
    """`batch` products of (m, k) and (k, n). Of attention: (queries, head) and (head, keys), for every head."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOperation:
    """A kernel's name, its floating-point operations, the dtype in which it does them, and the bytes that it moves.

    `sizes` are those of its matrix products; None for other kernels. `causal` attention can leave out the scores of
    later positions: its floating-point operations here are those of all scores. A product of 16-bit matrices reads
    `copied_bytes` at a time: all rows start at a multiple of them. A product's left `operand` is read "again", after
    another product, is the result of "attention", or is "new"; None for other kernels.
    """

    name: str
    flops: int
    dtype: str
    moved_bytes: int
    sizes: MatrixSizes | None = None
    causal: bool = False
    copied_bytes: int = MOST_COPIED_BYTES
    operand: Literal["new", "again", "attention"] | None = None


Sizes = Mapping[int, int]
"""Bytes by storage, which have numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """An operation with the bytes that it reads and writes of every storage.

    `fuses`: it works element by element, or row by row, and may be part of a kernel (`fusion`).
    """

    operation: DeviceOperation
    reads: Sizes
    writes: Sizes
    fuses: bool


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes are untyped
    """Notes every operation that runs in this mode, and the memory that the operations' results take.

    Memory is that of live storages that operations have made in this mode: `held_bytes` now, `peak_bytes` the maximum
    since `start_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic: list[Traffic] = []
        self._numbers: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._storages = 0
        self.held_bytes = 0
        self.peak_bytes = 0
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Literal["again", "attention"]]] = {}

    def branch(self) -> "OperationRecorder":
        """A recorder that knows the storages of this one, without seeing each other's operations."""
        other = OperationRecorder()
        other._numbers, other._storages, other._known = dict(self._numbers), self._storages, dict(self._known)
        return other

    def start_peak(self) -> None:
        """Resets the peak to the present bytes."""
        self.peak_bytes = self.held_bytes

    def take(self) -> tuple[Traffic, ...]:
        """The operations since the last call."""
        taken, self.traffic = tuple(self.traffic), []
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

        kernel = func.overloadpacket
        written = results if func._schema.is_mutable else fresh
        if written and kernel not in _NOT_WRITTEN:
            # a selecting call reads as much of its first argument as it writes, an overwriting one nothing of it
            skips_first = kernel in _OVERWRITING or kernel in _SELECTING
            read_bytes = _distinct_bytes(taken[1:] if skips_first else taken)
            written_bytes = _distinct_bytes(written)
            read_bytes += written_bytes if kernel in _SELECTING else 0
            named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False))
            operation = DeviceOperation(
                name=str(kernel).removeprefix("aten."),
                flops=_flops(kernel, args, kwargs or {}, result),
                dtype=str(next(t.dtype for t in (*taken, *written))).removeprefix("torch."),
                moved_bytes=read_bytes + written_bytes,
                sizes=_sizes(kernel, args),
                causal=kernel in _QUERY and bool(named.get("is_causal", (kwargs or {}).get("is_causal", False))),
                operand=self._operand(_operands(kernel, args)[0]) if kernel in _FIRST_OPERAND else None,
                copied_bytes=copied_bytes(_operands(kernel, args)) if kernel in _FIRST_OPERAND else MOST_COPIED_BYTES,
            )
            self.traffic.append(
                Traffic(
                    operation=operation,
                    reads=self._sizes(taken[1:] if kernel in _OVERWRITING else taken),
                    writes=self._sizes(written),
                    fuses=not operation.flops and kernel not in _APART and kernel not in _SELECTING - _BY_ROW,
                )
            )
            if kernel in _QUERY:
                self._note(results[0], "attention")
        return result

    def number(self, storage: torch.UntypedStorage) -> int:
        """A storage's number, which no later one gets."""
        known = self._numbers.get(storage._cdata)
        if known is None or known[0]() is None:
            self._storages += 1
            known = self._numbers[storage._cdata] = weakref.ref(storage), self._storages
        return known[1]

    def _sizes(self, tensors: Sequence[Tensor]) -> dict[int, int]:
        found: dict[int, int] = {}
        for tensor in tensors:
            number = self.number(tensor.untyped_storage())
            found[number] = max(found.get(number, 0), _bytes(tensor))
        return found

    def _operand(self, tensor: Tensor) -> Literal["new", "again", "attention"]:
        """The class of a product's left operand; from now on it is "again"."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        kind = known[1] if known is not None and known[0]() is not None else "new"
        self._note(tensor, "again")
        return kind

    def _note(self, tensor: Tensor, kind: Literal["again", "attention"]) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = weakref.ref(storage), kind

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage's bytes from now until it is freed."""
        address, size_bytes = storage._cdata, storage.nbytes()
        if address in self._made:
            return

        def release(_: object) -> None:
            self.held_bytes -= size_bytes
            self._made.pop(address, None)

        self._made[address] = weakref.ref(storage, release)
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def _sizes(kernel: Any, args: Any) -> MatrixSizes | None:
    """The sizes of a matrix product or of attention."""
    if kernel in _QUERY:
        query, key = args[_QUERY[kernel] :][:2]
        return MatrixSizes(batch=prod(query.shape[:-2]), m=query.shape[-2], n=key.shape[-2], k=query.shape[-1])
    if kernel in _FIRST_OPERAND:
        left, right = _operands(kernel, args)
        return MatrixSizes(batch=prod(left.shape[:-2]), m=left.shape[-2], n=right.shape[-1], k=left.shape[-1])
    return None


def _operands(kernel: Any, args: Any) -> tuple[Tensor, Tensor]:
    """The two matrices of a product."""
    left, right = args[_FIRST_OPERAND[kernel] :][:2]
    return left, right


def copied_bytes(matrices: Sequence[Tensor]) -> int:
    """The largest alignment, in bytes, that all rows have (columns, of a transposed matrix).

    Elements wider than 16 bits do not count: their products do not wait for copies.
    """
    narrow = [matrix for matrix in matrices if matrix.element_size() <= 2]
    strides = (stride * matrix.element_size() for matrix in narrow for stride in matrix.stride() if stride > 1)
    return gcd(MOST_COPIED_BYTES, *strides)


def _flops(kernel: Any, args: Any, kwargs: Any, result: Any) -> int:
    """By torch's formulas. They leave out attention's kernels for CPUs, which have the formulas of a GPU's."""
    if kernel is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))  # type: ignore[no-untyped-call]
    if kernel is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        shapes = (t.shape for t in args[:4])
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    if kernel is aten._grouped_mm:  # torch has no formula: rows of all groups together, or sums over all of them
        return 2 * int(prod(args[0].shape)) * int(args[1].shape[-1])
    formula = flop_registry.get(kernel)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of these tensors, each counted once. Of an expanded tensor only the elements that exist count."""
    seen = {(storage_identity(t), t.storage_offset(), t.shape, t.stride()): t for t in tensors}
    return sum(map(_bytes, seen.values()))


def _bytes(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size if stride else min(size, 1) for size, stride in dimensions) * tensor.element_size()


def _tensors(value: Any) -> list[Tensor]:
    """The dense tensors in a value, and the parts of others."""
    if isinstance(value, Tensor):
        return [value] if is_dense(value) else list(parts_of(value) or ())
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return _tensors(tuple(value.values())) if isinstance(value, dict) else []
