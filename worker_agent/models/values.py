"""Values: what blocks and stages pass on, one tensor or a tuple of several."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Value = Tensor | tuple[Tensor, ...]


def as_values(returned: Any) -> tuple[Tensor, ...]:
    """What a block returned, as a tuple of tensors.

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
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
            raise TypeError(f"a block must return dense tensors, and this one returned a tensor that is {kind}")
    return values


def carries_gradient(tensor: Tensor) -> bool:
    """Whether autograd can give the tensor a gradient: real and complex numbers, and no others."""
    return tensor.is_floating_point() or tensor.is_complex()


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
