"""Blocks that wait instead of computing, p1 and p2 apart: pipelines of many stages show 2BP's schedule on few cores."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from worker_agent.engine.operations import RULES, Call, Rows


@dataclass(frozen=True, slots=True)
class Scaling:
    """y = x * weight, for a weight (width) and an input (B, width); every part takes `unit_s` for `samples` samples."""

    unit_s: float
    samples: int

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(B, width)."""
        self._wait(x)
        return x * weight

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """(B, width)."""
        self._wait(x)
        return gradient * weight

    def rows(self, x: Tensor, gradient: Tensor) -> Rows:
        """The gradients unchanged."""
        return x, gradient

    def weight_gradient(self, rows: Rows, weight: Tensor, onto: Tensor | None) -> Tensor:
        """(width)."""
        x, gradient = rows
        self._wait(x)
        of_weight = (x * gradient).sum(0)
        return of_weight if onto is None else onto.add_(of_weight)

    def bias_gradient(self, rows: Rows) -> Tensor:
        """(width), of a bias that there never is."""
        return rows[1].sum(0)

    def _wait(self, x: Tensor) -> None:
        time.sleep(self.unit_s * len(x) / self.samples)


def scaled(x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    """`scaling` as autograd knows it, with a fused backward."""
    if has_torch_function((x, weight)):
        return torch.as_tensor(handle_torch_function(scaled, (x, weight), x, weight, scaling))
    return torch.as_tensor(_Fused.apply(x, weight, scaling))  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        return scaling.output(x, weight, None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_x = ctx.scaling.input_gradient(gradient, x, weight)
        return of_x, ctx.scaling.weight_gradient((x, gradient), weight, None), None


def _scaled_call(x: Tensor, weight: Tensor, scaling: Scaling) -> Call:
    return Call(scaling, x, weight)


RULES[scaled] = _scaled_call


class Block(nn.Module):
    """One stage's work. It is shifted first, so that the first stage has a gradient to compute in p1 as well."""

    def __init__(self, scaling: Scaling, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        return scaled(x + self.shift, self.weight, self.scaling)


def blocks(*, depth: int, unit_s: float, samples: int, width: int = 8) -> list[nn.Module]:
    """`depth` blocks whose forward, p1 and p2 take `unit_s` each, a microbatch of so many samples."""
    return [Block(Scaling(unit_s, samples), width) for _ in range(depth)]
