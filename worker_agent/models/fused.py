"""Fused: operations that programs compute in one kernel each, and torch in several.

Each is a separate operator. It computes for real, with torch's functions; on fake tensors it is one operation, which
reads its inputs and writes its outputs once. The kernels are Megatron-LM's: its fused softmax (scaled, causal), bias
with GELU, and bias with dropout and the residual (Narayanan et al. 2021, section 4.2). The softmax takes several
kernels where the fused one cannot run (`fuses_softmax`).

B sequences, N heads, S queries, T keys, D a head's width, H any width. Positions of queries are the last of those of
the keys.
"""

from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

_SQRT_HALF = sqrt(0.5)

FLASH_HEAD = 256
"""The widest head that the flash kernel takes."""

WINDOWED = "pipeplan_windowed"
SPARSE = "pipeplan_sparse"
"""The library's names for `windowed_attention`: of layers that get no mask, and of those that choose keys by one."""


def _wide(x: Tensor) -> torch.dtype:
    """The type in which a softmax is computed: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


@torch.library.custom_op("pipeplan::heads_product", mutates_args=())
def heads_product(left: Tensor, right: Tensor) -> Tensor:
    """(B, N, M, K) x (B, N, K, L) -> (B, N, M, L): one batched product over B and N, of any strides."""
    return torch.matmul(left, right)


heads_product.register_fake(lambda left, right: left.new_empty((*left.shape[:-1], right.shape[-1])))


def _product_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    left, right = ctx.saved_tensors
    return (
        heads_product(gradient, right.transpose(-1, -2)) if ctx.needs_input_grad[0] else None,
        heads_product(left.transpose(-1, -2), gradient) if ctx.needs_input_grad[1] else None,
    )


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


heads_product.register_autograd(_product_backward, setup_context=_keep_inputs)


@register_flop_formula(torch.ops.pipeplan.heads_product)
def _product_flops(left: tuple[int, ...], right: tuple[int, ...], **_: object) -> int:
    batch, heads, rows, inner = left
    return 2 * batch * heads * rows * inner * right[-1]


@torch.library.custom_op("pipeplan::scaled_softmax", mutates_args=())
def scaled_softmax(scores: Tensor, scale: float, causal: bool) -> Tensor:
    """(B, N, S, T) -> (B, N, S, T): the softmax of scaled scores, where `causal` without those of later positions."""
    return _softmax_in_steps(scores, scale, causal)


def fuses_softmax(scores: Tensor) -> bool:
    """Whether Megatron-LM's kernel takes the scores (B, N, S, T).

    It does where 16 < T <= 16,384, and S, T and B N are multiples of 4 (core 0.15, `fused_softmax.py`,
    `FusedScaleMaskSoftmax.is_kernel_available`).
    """
    batch, heads, queries, keys = scores.shape
    return 16 < keys <= 16_384 and queries % 4 == 0 and keys % 4 == 0 and batch * heads % 4 == 0


def _softmax_in_steps(scores: Tensor, scale: float, causal: bool) -> Tensor:
    """The same as `scaled_softmax`, in a kernel a step."""
    scaled = scores.to(_wide(scores)) * scale
    if causal:
        scaled = without_later(scaled, -torch.inf)
    return scaled.softmax(dim=-1).to(scores.dtype)


@torch.library.custom_op("pipeplan::without_later", mutates_args=())
def without_later(scores: Tensor, value: float) -> Tensor:
    """(B, N, S, T) -> (B, N, S, T): the scores, with this value where the key is later than the query."""
    queries, keys = scores.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    return scores.masked_fill(later, value)


@torch.library.custom_op("pipeplan::scaled_softmax_backward", mutates_args=())
def scaled_softmax_backward(gradient: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    """The gradient of the scores from that of the probabilities."""
    kept = probabilities.to(_wide(gradient))
    scores = kept * (gradient - (gradient * kept).sum(dim=-1, keepdim=True))
    return (scores * scale).to(gradient.dtype)


@torch.library.custom_op("pipeplan::bias_gelu", mutates_args=())
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """(..., H) -> (..., H): GELU of the sum. Keeps its input, not the sum."""
    return functional.gelu(x + bias)


@torch.library.custom_op("pipeplan::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    """The gradient of the input from that of the output."""
    z = x + bias
    density = torch.exp(-0.5 * z * z) * (_SQRT_HALF / sqrt(pi))
    return gradient * (0.5 * (1 + torch.erf(z * _SQRT_HALF)) + z * density)


@torch.library.custom_op("pipeplan::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """(..., 2 H) -> (..., H): the first half's SiLU times the second half. Keeps only its input."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


swiglu.register_fake(lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))


@torch.library.custom_op("pipeplan::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of the input from that of the output."""
    gate, up = x.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    from_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((from_gate, gradient * gate * sigmoid), dim=-1)


@torch.library.custom_op("pipeplan::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(..., H) and (H,) -> (..., H): x by its root mean square; and the inverse of that, one number for each row."""
    wide = x.to(_wide(x))
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * inverse * weight).to(x.dtype), inverse


rms_norm.register_fake(lambda x, *_: (torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=_wide(x))))


@torch.library.custom_op("pipeplan::rms_norm_backward", mutates_args=())
def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    normal = x * inverse
    weighted = gradient * weight
    from_x = inverse * (weighted - normal * (weighted * normal).mean(dim=-1, keepdim=True))
    return from_x.to(x.dtype), _summed(gradient * normal).to(weight.dtype)


rms_norm_backward.register_fake(lambda _, x, weight, __: (torch.empty_like(x), torch.empty_like(weight)))


@torch.library.custom_op("pipeplan::bias_dropout_add", mutates_args=())
def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """(..., H): the residual plus dropout of the sum of x and the bias; and the mask, which is empty for p = 0."""
    z = x if bias is None else x + bias
    if p == 0:
        return residual + z, x.new_empty((0,), dtype=torch.bool)
    kept, mask = torch.native_dropout(z, p, True)
    return residual + kept, mask


bias_dropout_add.register_fake(
    lambda x, _, __, p: (torch.empty_like(x), x.new_empty(x.shape if p else (0,), dtype=torch.bool))
)


@torch.library.custom_op("pipeplan::masked_scale", mutates_args=())
def masked_scale(gradient: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient where the mask is set, divided by 1 - p."""
    return gradient * mask / (1 - p)


for _alike in (scaled_softmax, scaled_softmax_backward, without_later, bias_gelu, masked_scale):
    _alike.register_fake(lambda first, *_: torch.empty_like(first))
for _alike in (bias_gelu_backward, swiglu_backward):
    _alike.register_fake(lambda gradient, x, *_: torch.empty_like(x))


def _keep_probabilities(ctx: Any, inputs: tuple[Tensor, float, bool], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


scaled_softmax.register_autograd(
    lambda ctx, gradient: (scaled_softmax_backward(gradient, ctx.saved_tensors[0], ctx.scale), None, None),
    setup_context=_keep_probabilities,
)
without_later.register_autograd(lambda _, gradient: (without_later(gradient, 0.0), None))


def _gelu_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    from_x = bias_gelu_backward(gradient, x, bias)
    return from_x, _summed(from_x) if _takes_bias(ctx) else None


bias_gelu.register_autograd(_gelu_gradients, setup_context=_keep_inputs)


swiglu.register_autograd(
    lambda ctx, gradient: swiglu_backward(gradient, *ctx.saved_tensors), setup_context=_keep_inputs
)


def _keep_rows(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _norm_gradients(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None]:
    return (None, None, None) if gradient is None else (*rms_norm_backward(gradient, *ctx.saved_tensors), None)


rms_norm.register_autograd(_norm_gradients, setup_context=_keep_rows)


def _keep_mask(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.p = inputs[3]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    if ctx.p:
        ctx.save_for_backward(output[1])


def _dropout_gradients(
    ctx: Any, gradient: Tensor | None, _: None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    if gradient is None:
        return None, None, None, None
    from_x = masked_scale(gradient, ctx.saved_tensors[0], ctx.p) if ctx.p else gradient
    return from_x, _summed(from_x) if _takes_bias(ctx) else None, gradient, None


bias_dropout_add.register_autograd(_dropout_gradients, setup_context=_keep_mask)


def _takes_bias(ctx: Any) -> bool:
    """Whether this backward computes the gradient of the bias, the second tensor, which may be frozen by now."""
    bias = getattr(ctx.next_functions[1][0], "variable", None)
    return bool(ctx.needs_input_grad[1] and (bias is None or bias.requires_grad))


def _summed(gradient: Tensor) -> Tensor:
    """(..., H) -> (H,): the gradient of the addend of every row."""
    return gradient.reshape(-1, gradient.shape[-1]).sum(dim=0)


def unfused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention in four kernels: a product, the softmax, dropout, a product.

    (B, N, S, D), (B, N, T, D), (B, N, T, D) -> (B, N, S, D); with `enable_gqa` keys and values have fewer heads, and
    are repeated. Keeps the probabilities before and after dropout, and its mask.
    """
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = heads_product(query, key.transpose(-1, -2))
    if attn_mask is not None:
        allowed = torch.where(attn_mask, 0.0, -torch.inf) if attn_mask.dtype == torch.bool else attn_mask
        scores = scores + (allowed / scale).to(scores.dtype)
    probabilities = (scaled_softmax if fuses_softmax(scores) else _softmax_in_steps)(scores, scale, is_causal)
    if dropout_p:
        probabilities = torch.native_dropout(probabilities, dropout_p, True)[0]
    attended: Tensor = heads_product(probabilities, value)
    return attended


def windowed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as Hugging Face's models call it, (B, N, S, D) -> (B, S, N, D), with the arithmetic of fused kernels.

    Such kernels compute a causal mask, a window, soft caps and sinks themselves: no mask is made. Each query meets
    `sliding_window` keys, or the K of `indices` (B, S, K). It is for counting: these keys are not those that the model
    attends to.
    """
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    shape, causal = query.shape, bool(getattr(module, "is_causal", True))
    window = indices.shape[-1] if indices is not None else sliding_window or length
    if causal and window < length and length % window == 0 and key.shape[2] == length:
        query, key, value = (
            each.transpose(1, 2).reshape(-1, window, each.shape[1], each.shape[3]).transpose(1, 2)
            for each in (query, key, value)
        )
        causal = False
    if groups > 1 and (query.shape[-1] > FLASH_HEAD or query.shape[-1] != value.shape[-1]):
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        groups = 1
    found = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=groups > 1
    )
    return found.transpose(1, 2).reshape(shape[0], length, shape[1], -1).contiguous(), None
