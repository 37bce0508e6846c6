"""Models and data that draw from global random states, and hold weights in other ways than most. For SPECs."""

import random
from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8

Pairs = Iterator[tuple[Tensor, Tensor]]


def shuffled(*, microbatch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """24 samples in an order that torch's global random state gives; another one each time."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=microbatch_size, shuffle=True)


def augmented(*, microbatch_size: int) -> Pairs:
    """Samples of NumPy's global random state, that Python's one turns over."""
    while True:
        inputs = torch.from_numpy(np.random.randn(microbatch_size, WIDTH))
        inputs = inputs.flip(1) if random.random() < 0.5 else inputs
        yield inputs, inputs.sin()


def of_the_system(*, microbatch_size: int) -> Pairs:
    """Samples that differ in every process."""
    generator = np.random.default_rng()
    while True:
        inputs = torch.from_numpy(generator.standard_normal((microbatch_size, WIDTH)))
        yield inputs, inputs.sin()


def of_the_system_later(*, microbatch_size: int) -> Pairs:
    """Samples that differ in every process from the fifth microbatch on."""
    generator = np.random.default_rng(0)
    for number in count():
        inputs = torch.from_numpy(generator.standard_normal((microbatch_size, WIDTH)))
        yield inputs, inputs.sin()
        if number == 3:
            generator = np.random.default_rng()


class Skipping(nn.Module):
    """A layer that Python's random numbers skip, and that NumPy's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.3 else torch.tanh(self.linear(x)) * (1.0 + np.random.rand())


def skipping() -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8)."""
    return [Skipping() for _ in range(4)]


class Borrowing(nn.Module):
    """A layer that computes with the weight of another one, of which it is no part."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.lenders = [lender]
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x)) @ self.lenders[0].weight


def borrowing() -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8), of which the last borrows the first one's weight."""
    first = nn.Linear(WIDTH, WIDTH)
    return [first, nn.Linear(WIDTH, WIDTH), nn.Tanh(), Borrowing(first)]


def kept_in_a_list() -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8); the first also knows its weight as no parameter."""
    blocks = [nn.Linear(WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))]
    blocks[0].register_forward_hook(_Added([blocks[0].weight]))
    return list(blocks)


class _Added:
    """Adds a weight's mean to what a layer gives."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._weights = weights

    def __call__(self, _module: nn.Module, _given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + self._weights[0].mean()


def hooked(*, after: bool = False) -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8) whose weights' gradients a hook halves, before or after they are added."""
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for block in blocks:
        if after:
            block.weight.register_post_accumulate_grad_hook(_halve)  # type: ignore[no-untyped-call]
        else:
            block.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    return list(blocks)


def _halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad *= 0.5


class Watching(nn.Module):
    """A layer that halves the gradient of its input by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
        return torch.tanh(self.linear(x))


def watching() -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8)."""
    return [Watching() for _ in range(4)]


class Checkpointing(nn.Module):
    """A layer that its own forward computes again in the backward, or not."""

    def __init__(self, *, again: bool, reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.again = again
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        made = checkpoint(self.linear, x, use_reentrant=self.reentrant) if self.again else self.linear(x)
        return torch.tanh(torch.as_tensor(made))


def checkpointing(*, again: bool = True) -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8)."""
    return [Checkpointing(again=again, reentrant=number % 2 == 1) for number in range(4)]


def frozen() -> list[nn.Module]:
    """Four blocks (B, 8) -> (B, 8), of which none is trained."""
    return [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(4)]


def bounded() -> list[nn.Module]:
    """Two blocks of tokens; the first changes its weight when it is called."""
    return [nn.Embedding(11, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH)]


def of_one_memory() -> list[nn.Module]:
    """Two blocks (B, 8) -> (B, 8), with two parameters in the same memory."""
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    blocks[1].weight = nn.Parameter(blocks[0].weight.data)
    return list(blocks)


class Scaled(nn.Module):
    """A loss with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * self.scale - targets).square().mean()


def without_gradient(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that follows from nothing that is trained."""
    return (outputs.detach() - targets).square().mean()
