"""Values: the outputs of blocks and stages, one tensor or a tuple of several."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Value = Tensor | tuple[Tensor, ...]


def as_values(returned: Any) -> tuple[Tensor, ...]:
    """A block's result as a tuple of tensors.

    Raises TypeError for anything but dense tensors: they may have to be sent to another device as plain memory.
    """
    values = returned if isinstance(returned, tuple) else (returned,)
    if not values:
        raise TypeError("a block must return a tensor or a tuple of tensors, and this one returned an empty tuple")
    for value in values:
        if not isinstance(value, Tensor):
            what = type(value).__name__
            held = what if value is returned else f"a tuple that holds {what}"
            raise TypeError(f"a block must return a tensor or a tuple of tensors, and this one returned {held}")
        if not is_dense(value):
            kind = kind_of(value)
            raise TypeError(f"a block must return dense tensors, and this one returned a tensor that is {kind}")
    return values


def kind_of(tensor: Tensor) -> str:
    """The layout of a tensor that is not dense, in a word."""
    if tensor.is_quantized or tensor.is_nested:
        return "quantized" if tensor.is_quantized else "nested"
    return type(tensor).__name__ if tensor.layout is torch.strided else str(tensor.layout)


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor, or of its parts as far as torch tells them."""
    return tensor.nbytes if is_dense(tensor) else sum(part.nbytes for part in parts_of(tensor) or ())


_COMPRESSED_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
_COMPRESSED_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)


def parts_of(tensor: Tensor) -> tuple[Tensor, ...] | None:
    """The dense tensors in memory that a tensor consists of: itself, or the parts of a sparse, nested or composed one.

    A tensor without contents (meta) has none. None where torch does not tell the parts: of memory in another library's
    layout, and of a class of tensors that does not name them (`__tensor_flatten__`).
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return _parts_of_all([getattr(tensor, name) for name in names])
    if tensor.layout is torch.sparse_coo:
        return _parts_of_all((tensor._indices(), tensor._values()))
    if tensor.layout in _COMPRESSED_BY_ROW:
        return _parts_of_all((tensor.crow_indices(), tensor.col_indices(), tensor.values()))
    if tensor.layout in _COMPRESSED_BY_COLUMN:
        return _parts_of_all((tensor.ccol_indices(), tensor.row_indices(), tensor.values()))
    if tensor.device.type == "meta" or tensor._is_zerotensor():
        return ()
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    try:
        _ = storage.device.type == "meta" or storage.data_ptr()  # a fake tensor's storage has no address
    except RuntimeError:
        return None
    return (tensor,)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory, its own only part; one without contents (meta) would be."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    if type(tensor) is Tensor:
        return True
    parts = parts_of(tensor)
    return parts is not None and all(part is tensor for part in parts)


def _parts_of_all(tensors: Iterable[Tensor]) -> tuple[Tensor, ...] | None:
    parts: list[Tensor] = []
    for tensor in tensors:
        own = parts_of(tensor)
        if own is None:
            return None
        parts += own
    return tuple(parts)


def carries_gradient(tensor: Tensor) -> bool:
    """Whether autograd can give the tensor a gradient: real and complex numbers, and no others."""
    return tensor.is_floating_point() or tensor.is_complex()


def first_trained(blocks: Sequence[nn.Module]) -> int:
    """The first block with a trained parameter: no gradient goes back beyond it. 0 for a model without frozen ones."""
    graded = [[p.requires_grad for p in block.parameters()] for block in blocks]
    if all(map(all, graded)):
        return 0
    return next((number for number, each in enumerate(graded) if any(each)), len(blocks))


def nodes_of(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """The nodes of autograd's graph that lead to some tensors, each once."""
    seen: dict[Any, None] = {}
    left: list[Any] = [tensor.grad_fn for tensor in tensors]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen[node] = None
            left += [following for following, _ in node.next_functions]
    return tuple(seen)


def leaves_of(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The leaves of autograd's graph that tensors are made of, each once; a tensor may be one itself."""
    given = tuple(tensors)
    found = [node.variable for node in nodes_of(given) if hasattr(node, "variable")]
    found += [tensor for tensor in given if tensor.grad_fn is None and tensor.requires_grad]
    return tuple({id(leaf): leaf for leaf in found}.values())


def matching_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that the tensor takes where the model computes in `dtype`.

    A complex tensor takes the complex form of `dtype`; whole numbers keep their own. 16-bit dtypes have no useful
    complex form: there a complex tensor keeps its own.
    """
    if tensor.is_floating_point():
        return dtype
    wide = dtype in (torch.float32, torch.float64)
    return dtype.to_complex() if tensor.is_complex() and wide else tensor.dtype


def cast_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    """Casts a tensor of real numbers, which stays the same object."""
    if tensor.dtype is dtype or not tensor.is_floating_point():
        return
    if is_dense(tensor):
        if isinstance(tensor, FakeTensor):  # a constant's value would keep its type
            tensor.constant = None
        tensor.data = tensor.data.to(dtype)
        return
    cast = tensor.detach().to(dtype)  # through `data` a sparse tensor would keep its old values
    parameter = isinstance(tensor, nn.Parameter)
    other = nn.Parameter(cast, requires_grad=False) if parameter else cast
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
