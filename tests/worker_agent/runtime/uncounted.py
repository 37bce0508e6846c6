"""Blocks that compute with tensors of other kinds than plain memory, and blocks that let nobody look at what they save.

They are tried where bytes are counted. For SPECs: `model`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils._pytree import tree_map

WIDTH = 8


class Opaque(Tensor):
    """A tensor around another one, which does not name its part."""

    content: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Opaque":
        """Shaped as the inner tensor."""
        made: Opaque = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.content = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no types
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes with the inner tensors."""
        given, named = tree_map(lambda t: t.content if isinstance(t, Opaque) else t, (args, kwargs or {}))
        return tree_map(lambda t: cls(t) if isinstance(t, Tensor) else t, func(*given, **named))


class Composed(Opaque):
    """One that names it."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """The part's name."""
        return ["content"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], _: None, size: Any, stride: Any) -> "Composed":
        """From the part."""
        made = Composed(parts["content"])
        assert isinstance(made, Composed)
        return made


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type[Opaque]) -> Tensor:
        return kind(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.content if isinstance(gradient, Opaque) else gradient, None


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Opaque) -> Tensor:
        ctx.kind = type(x)
        return x.content.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        kept: Tensor = ctx.kind(gradient)
        return kept


class _SavesSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.to_sparse())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient + x.to_dense()


def _sparse(x: Tensor, block: "Block") -> Any:
    return torch.sparse.mm(block.odd, x.t()).t()


def _nested(x: Tensor, block: "Block") -> Any:
    halves = torch.nested.as_nested_tensor([x[:1], x[1:]])
    return torch.nested.to_padded_tensor(block.linear(halves), 0.0).reshape(-1, WIDTH)[: len(x)] + x


def _jagged(x: Tensor, block: "Block") -> Any:
    halves = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))
    return torch.relu(block.linear(halves)).values()


def _without_hooks(x: Tensor, _: "Block") -> Tensor:
    with disable_saved_tensors_hooks("no hooks here"):
        return torch.tanh(x)


def _wrapped(kind: type[Opaque]) -> "Compute":
    return lambda x, _: _Unwrap.apply(torch.tanh(_Wrap.apply(x, kind)))  # type: ignore[no-untyped-call]


Compute = Callable[[Tensor, "Block"], Any]
Make = Callable[[], Tensor]


def _weights() -> Tensor:
    return torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH).relu()


def _product(x: Tensor, block: "Block") -> Any:
    return (block.odd @ x.t()).t()


COUNTED: dict[str, tuple[Make | None, Compute]] = {
    "coo": (lambda: _weights().to_sparse(), _sparse),
    "csr": (lambda: _weights().to_sparse_csr(), _product),
    "csc": (lambda: _weights().to_sparse_csc(), _product),
    "made_sparse": (None, lambda x, _: torch.sparse.mm(x.to_sparse(), _weights().to(x.dtype))),
    "saves_sparse": (None, lambda x, _: _SavesSparse.apply(x)),  # type: ignore[no-untyped-call]
    "nested": (None, _nested),
    "jagged": (None, _jagged),
    "quantized": (
        lambda: torch.quantize_per_tensor(_weights(), 0.1, 0, torch.qint8),
        lambda x, block: x @ block.odd.dequantize().to(x.dtype),
    ),
    "meta": (lambda: torch.empty(WIDTH, device="meta"), lambda x, _: x.tanh()),
    "vmap": (None, lambda x, _: torch.func.vmap(torch.tanh)(x)),
    "composed": (None, _wrapped(Composed)),
    "composed_buffer": (lambda: Composed(_weights()), lambda x, block: x @ block.odd.content.to(x.dtype)),
    "opaque_buffer": (lambda: Opaque(_weights()), lambda x, block: x @ block.odd.content.to(x.dtype)),
}
"""By kind a buffer of the block and what it computes. All bytes that a microbatch keeps can be counted."""

UNCOUNTED: dict[str, tuple[Make | None, Compute]] = {
    "opaque": (None, _wrapped(Opaque)),
    "gradient": (None, lambda x, _: x * torch.func.grad(lambda y: (y**3).sum())(x)),
    "without_hooks": (None, _without_hooks),
}
"""Kinds of which not all can."""


class Block(nn.Module):
    """A linear layer, and a kind of block after it."""

    odd: Any

    def __init__(self, kind: str, *, persistent: bool = False) -> None:
        super().__init__()
        make, self._compute = (COUNTED | UNCOUNTED)[kind]
        self.linear = nn.Linear(WIDTH, WIDTH)
        if make is not None:
            self.register_buffer("odd", make(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as the input."""
        y: Tensor = self._compute(self.linear(x), self)
        return y


def model(kind: str, *, persistent: bool = False) -> list[nn.Module]:
    """A block of a kind between plain ones."""
    return [nn.Linear(WIDTH, WIDTH), Block(kind, persistent=persistent), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
