"""Factories that the tests name by SPEC: good ones, and each kind of bad one."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def linear_relu(*, inputs: int = 3, hidden: int = 5) -> list[nn.Module]:
    return [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 2, bias=False)]


def shared() -> list[nn.Module]:
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    return [first, nn.BatchNorm1d(4), last]


def two_streams() -> list[nn.Module]:
    return [_Split(), _Join()]


def nothing() -> list[nn.Module]:
    return []


def numbers() -> list[int]:
    return [1, 2]


def raising() -> list[nn.Module]:
    raise KeyError("the weights are not here")


def countdown(*, microbatch_size: int, start: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(start, 0, -1):
        yield torch.full((microbatch_size, 1), float(number)), torch.zeros(microbatch_size, 1)


def wrong_size(*, microbatch_size: int) -> list[tuple[Tensor, Tensor]]:
    good, bad = torch.zeros(microbatch_size, 2), torch.zeros(microbatch_size + 1, 2)
    return [(good, good), (bad, good)]


_once = iter([(torch.zeros(2, 1), torch.zeros(2, 1))])


def exhausted_for_good() -> Iterator[tuple[Tensor, Tensor]]:
    return _once


def absolute_error(outputs: Tensor, targets: Tensor, *, scale: float = 1.0) -> Tensor:
    return (outputs - targets).abs().mean() * scale


class _Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, x.argmax(dim=1)


class _Join(nn.Module):
    def forward(self, scaled: Tensor, chosen: Tensor) -> Tensor:
        return scaled.gather(1, chosen[:, None])
