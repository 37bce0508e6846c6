"""Presets: small models and their data, to try pipelines out and for tests. SPECs name every function here."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeplan.errors import require_amount, require_count
from worker_agent.models.samples import Samples


def mlp(*, width: int = 16, depth: int = 6) -> list[nn.Module]:
    """`depth` blocks (B, width) -> (B, width): a linear layer and a tanh, the last one without."""
    require_count("model.width", width)
    require_count("model.depth", depth)
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth - 1)]
    return [*hidden, nn.Linear(width, width)]


def regression(*, microbatch_size: int, seed: int, width: int = 16, samples: int = 1024) -> Samples:
    """Normal inputs (B, width). The targets are a non-linear function of them, which a model can learn."""
    require_count("data.width", width)
    require_count("data.samples", samples)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, width, generator=generator)
    mixing = torch.randn(width, width, generator=generator) / width**0.5
    targets = torch.sin(inputs @ mixing)
    return Samples(lambda numbers: (inputs[numbers], targets[numbers]), count=samples, microbatch_size=microbatch_size)


def random_features(*, microbatch_size: int, seed: int, width: int, samples: int = 256) -> Samples:
    """Normal inputs (B, width), with zeros (B,) as targets for losses that look at none."""
    require_count("data.width", width)
    require_count("data.samples", samples)
    inputs = torch.randn(samples, width, generator=torch.Generator().manual_seed(seed))
    return Samples(
        lambda numbers: (inputs[numbers], torch.zeros(len(numbers))), count=samples, microbatch_size=microbatch_size
    )


def sleep(*, depth: int = 4, forward_s: float = 0.01, backward_s: float = 0.02, width: int = 8) -> list[nn.Module]:
    """`depth` blocks that wait instead of computing: a pipeline of many stages shows its schedule on few cores.

    Profile them by the wall clock, because waiting takes no processor time.
    """
    require_count("model.depth", depth)
    require_count("model.width", width)
    require_amount("model.forward_s", forward_s)
    require_amount("model.backward_s", backward_s)
    return [SleepBlock(forward_s=forward_s, backward_s=backward_s, width=width) for _ in range(depth)]


class SleepBlock(nn.Module):
    """Scales its input (B, width) by a trainable weight, and waits in the forward and in the backward."""

    def __init__(self, *, forward_s: float, backward_s: float, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.forward_s = forward_s
        self.backward_s = backward_s

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        waited: Tensor = _Wait.apply(x * self.weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return waited


class _Wait(torch.autograd.Function):
    """The identity, after a pause."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None
