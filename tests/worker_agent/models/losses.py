"""Losses that SPECs name in all ways, and modules and data that are made already."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

criterion = nn.L1Loss()
summed = nn.L1Loss(reduction="sum")
weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
part = partial(functional.l1_loss, reduction="sum")
part_of_a_class = partial(nn.L1Loss, reduction="sum")
blocks = [nn.Linear(2, 2)]
samples = [(torch.zeros(2, 2), torch.zeros(2, 2))]
loader: Any = DataLoader(samples)  # type: ignore[arg-type]


class Scaled:
    """A callable object that is a loss."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __call__(self, outputs: Tensor, targets: Tensor, *, more: float = 0.0) -> Tensor:
        """The scaled mean of the distances."""
        return self.scale * (outputs - targets).abs().mean() + more


scaled = Scaled()


class Factory:
    """A callable object that makes one."""

    def __call__(self, scale: float = 1.0) -> Scaled:
        """Of a scale."""
        return Scaled(scale)


factory = Factory()


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides parameters."""

    def inner(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return inner


@logged
def hidden(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with hidden parameters."""
    return (outputs - targets).abs().mean()


@logged
def hidden_factory(scale: float = 3.0) -> Scaled:
    """A factory with hidden parameters."""
    return Scaled(scale)


def with_defaults(outputs: Tensor | None = None, targets: Tensor | None = None) -> float:
    """A loss that is taken for a factory."""
    return 0.0


def failing_factory(scale: float = 1.0, more: float = 0.0) -> Scaled:
    """One that fails."""
    raise RuntimeError("no scale is right")


def of_a_class() -> type[nn.Module]:
    """One that makes no loss."""
    return nn.L1Loss


def of_one_argument() -> Callable[[Tensor], Tensor]:
    """One that makes no loss."""
    return torch.mean


def of_outputs_alone() -> nn.Module:
    """One that makes no loss."""
    return nn.Tanh()


class Required:
    """A loss of a scale."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean of the distances."""
        return self.scale * (outputs - targets).abs().mean()


trained = nn.Linear(2, 2)
