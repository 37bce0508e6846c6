"""GPU kernels: calls in which torch takes another way on a GPU than on a CPU take the GPU's, on any device.

Fake tensors on a machine without a GPU are a CPU's. Three things differ there by more than speed: a GPU's dropout keeps
a mask of one byte an element, its attention kernels do not keep the matrix of scores, and both do in one kernel what a
CPU does in several.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD = 256
"""The widest head that the flash kernel takes."""


class GpuKernels(TorchFunctionMode):
    """Under it, dropout and scaled dot-product attention are what they are on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, or what stands for it."""
        if func is functional.dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return functional.dropout(input, p, training, inplace)


def _attention(
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
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        efficient = aten._scaled_dot_product_efficient_attention
        found = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
        return found[0]  # type: ignore[no-any-return]
    plain = aten._scaled_dot_product_attention_math
    arguments = {"scale": scale, "enable_gqa": enable_gqa}
    return plain(query, key, value, attn_mask, dropout_p, is_causal, **arguments)[0]  # type: ignore[no-any-return]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as what is added to the scores, seen at their shape."""
    shape = (*query.shape[:-1], key.shape[-2])
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return mask.expand(shape)
