"""Scans: recurrences over a sequence, which programs compute in one kernel and the library's own code in many.

The library names a kernel for each scan, and also has torch code with one or several kernels for every token or chunk.
For counting (tensors without contents) a scan is one operation. It reads its inputs and writes its output once, and
keeps both for the backward, which recomputes states. Tensors with contents run the library's code.

B sequences, S tokens, H heads (of Mamba: channels), G groups, K and V a head's widths, N numbers a state, Q a chunk.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

BACKWARD_FLOPS = 2.5
"""Of the forward's operations: two products for each of its own, and the scores again, as of attention."""


@torch.library.custom_op("pipeplan::scan", mutates_args=())
def scan(like: Tensor, others: list[Tensor], flops: int) -> Tensor:
    """A recurrence's output, which has the shape of its first input. It has no contents."""
    raise TypeError("a scan that is counted needs tensors without contents: those with contents run the library's code")


@torch.library.custom_op("pipeplan::scan_backward", mutates_args=())
def scan_backward(gradient: Tensor, output: Tensor, inputs: list[Tensor], flops: int) -> list[Tensor]:
    """The gradients of all inputs. They have no contents."""
    raise TypeError("a scan that is counted needs tensors without contents: those with contents run the library's code")


scan.register_fake(lambda like, *_: torch.empty_like(like))
scan_backward.register_fake(lambda _, __, inputs, ___: [torch.empty_like(each) for each in inputs])


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor], int], output: Tensor) -> None:
    like, others, ctx.flops = inputs
    ctx.save_for_backward(like, *others, output)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, list[Tensor], None]:
    *inputs, output = ctx.saved_tensors
    first, *others = scan_backward(gradient, output, inputs, int(BACKWARD_FLOPS * ctx.flops))
    return first, others, None


scan.register_autograd(_gradients, setup_context=_keep)


register_flop_formula([torch.ops.pipeplan.scan, torch.ops.pipeplan.scan_backward])(lambda *of, **_: int(of[-1]))


def _selective(x: Tensor, dt: Tensor, *others: Any, z: Tensor | None = None, **named: Any) -> Tensor:
    """Mamba's: (B, H, S) and others -> (B, H, S), with six operations for each number of a state. The kernel's memory
    traffic takes longer (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section
    3.3.2).
    """
    given = _tensors(dt, *others, *named.values())
    found: Tensor = scan(x, given, 6 * x.numel() * given[1].shape[-1])
    return found if z is None else found * functional.silu(z)


def _chunked(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, **named: Any) -> Tensor:
    """Mamba-2's: (B, S, H, V), (B, S, H), (H,), (B, S, G, N) twice -> (B, S, H, V) (Dao and Gu 2024, "Transformers are
    SSMs", section 6): scores in a chunk, their weighted sums, and states that are written and read.
    """
    batch, length, heads, width = x.shape
    groups, numbers = b.shape[-2:]
    each = 2 * chunk_size * (groups * numbers + heads * width) + 4 * heads * numbers * width
    found: Tensor = scan(x, _tensors(dt, a, b, c, *named.values()), batch * length * each)
    return found


def _delta(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, chunk_size: int = 64, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule: (B, S, H, K) twice, (B, S, H, V) and others -> (B, S, H, V) (Yang et al. 2024, "Gated Delta
    Networks", section 3.3): two kinds of scores in a chunk, three products with them, and three with states.
    """
    keys, values = key.shape[-1], value.shape[-1]
    each = 2 * chunk_size * (3 * keys + 2 * values) + 6 * keys * values
    return scan(value, [query, key, g, beta], prod(value.shape[:-1]) * each), None


def _tensors(*values: Any) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


COUNTED: dict[str, Callable[..., Any]] = {
    "mamba_selective_scan": _selective,
    "mamba2_chunk_scan": _chunked,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "find_packed_sequence_indices": lambda _: None,  # a sample is one sequence
}
"""The scans that run without contents, by the library's names for its own code."""


def count_without_contents(library_code: Any) -> None:
    """Has a module of the library count its scans as one operation each, and ask for no tensor's contents."""
    for name, counted in COUNTED.items():
        own = getattr(library_code, name, None)
        if own is not None and not isinstance(own, partial):
            setattr(library_code, name, partial(_either, own, counted))


def _either(own: Callable[..., Any], counted: Callable[..., Any], first: Tensor, *others: Any, **named: Any) -> Any:
    without_contents = first.is_meta or isinstance(first, FakeTensor)
    return (counted if without_contents else own)(first, *others, **named)
