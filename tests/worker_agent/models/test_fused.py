"""Fused kernels compute what torch's functions do, and so do their gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from worker_agent.models.fused import bias_dropout_add, bias_gelu, heads_product, rms_norm, scaled_softmax, swiglu
from worker_agent.models.fused import unfused_attention as unfused


def numbers(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.requires_grad_()


X, BIAS, RESIDUAL, SCORES = numbers(2, 3, 4), numbers(4, seed=1), numbers(2, 3, 4, seed=2), numbers(2, 2, 3, 5, seed=3)


def softmax(scores: Tensor) -> Tensor:
    later = torch.ones(3, 5, dtype=torch.bool).triu(3)  # the queries are the last 3 of 5 positions
    return (scores * 0.3).masked_fill(later, -torch.inf).softmax(dim=-1)


@pytest.mark.parametrize(
    ("fused", "plain", "inputs"),
    [
        (bias_gelu, lambda x, b: functional.gelu(x + b), (X, BIAS)),
        (swiglu, lambda x: functional.silu(x[..., :2]) * x[..., 2:], (X,)),
        (lambda x, b, r: bias_dropout_add(x, b, r, 0.0)[0], lambda x, b, r: x + b + r, (X, BIAS, RESIDUAL)),
        (lambda x, r: bias_dropout_add(x, None, r, 0.0)[0], torch.add, (X, RESIDUAL)),
        (lambda s: scaled_softmax(s, 0.3, True), softmax, (SCORES,)),
        (lambda s: scaled_softmax(s, 0.3, False), lambda s: (s * 0.3).softmax(-1), (SCORES,)),
        (lambda x, w: rms_norm(x, w, 1e-3)[0], lambda x, w: functional.rms_norm(x, (4,), w, 1e-3), (X, BIAS)),
        (heads_product, torch.matmul, (SCORES, numbers(2, 2, 5, 4, seed=4))),
    ],
    ids=["bias_gelu", "swiglu", "bias_add", "add", "causal softmax", "softmax", "norm", "product"],
)
def test_a_fused_kernel_equals_torchs_functions(
    fused: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    torch.testing.assert_close(fused(*inputs), plain(*inputs))
    assert torch.autograd.gradcheck(fused, inputs)


def test_dropout_leaves_the_residual_where_it_drops_and_its_gradient_is_zero_there() -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    bias = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    added, mask = bias_dropout_add(x, bias, torch.full((1000,), 7.0, dtype=torch.float64), 0.25)
    added.sum().backward()
    assert 650 < int(mask.sum()) < 850
    torch.testing.assert_close(added, 7 + mask.double() * 2 / 0.75)
    torch.testing.assert_close(x.grad, mask.double() / 0.75)
    torch.testing.assert_close(bias.grad, mask.double() / 0.75)


@pytest.mark.parametrize("length", [20, 5], ids=["one kernel's softmax", "softmax in steps"])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_unfused_attention_equals_torchs(kv_heads: int, mask: str | None, length: int) -> None:
    query, key, value = (numbers(2, n, length, 3, seed=n) for n in (4, kv_heads, kv_heads))
    allowed = torch.ones(length, length, dtype=torch.bool).tril(1)
    options: dict[str, Any] = {
        "attn_mask": {"bool": allowed, "float": allowed.double()}.get(str(mask)),
        "enable_gqa": kv_heads < 4,
    }
    for causal in (False, mask is None):
        mine = unfused(query, key, value, is_causal=causal, scale=0.7, **options)
        torchs = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.7, **options)
        torch.testing.assert_close(mine, torchs)
        gradients = (torch.autograd.grad(y.sum(), (query, key, value)) for y in (mine.tanh(), torchs.tanh()))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)
