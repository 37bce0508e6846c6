"""A chain whose blocks hand on several tensors, drop out, and train parameters of several kinds. Named by SPECs."""

import torch
from torch import Tensor, nn


def awkward(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width)."""
    return [Fork(width), Mix(width), Mix(width), Join(width)]


class Fork(nn.Module):
    """(B, width) -> (B, width) twice, and numbers that are no floating-point ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = torch.tanh(self.norm(self.up(x))).chunk(2, dim=1)
        return left, right, torch.arange(len(x))


class Mix(nn.Module):
    """A weight used twice, dropout, and a scale that no layer holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.25)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, left: Tensor, right: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left = self.drop(torch.tanh(self.linear(left))) + right[numbers] * self.scale
        return left, torch.tanh(self.linear(right)), numbers


class Join(nn.Module):
    """A convolution over what was handed on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 1, 3, padding=1)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, left: Tensor, right: Tensor, numbers: Tensor) -> Tensor:
        joined = self.convolution(torch.stack([left, right[numbers]], dim=1)).squeeze(1)
        return torch.as_tensor(self.out(joined))


def tied(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width): the last has the first one's weight and the second one's bias."""
    blocks = [nn.Linear(width, width) for _ in range(4)]
    blocks[3].weight = blocks[0].weight
    blocks[3].bias = blocks[1].bias
    return [nn.Sequential(block, nn.Tanh()) for block in blocks]


def untied(*, width: int = 8) -> list[nn.Module]:
    """The same to begin with, but every block has its own."""
    blocks = tied(width=width)
    last = blocks[3][0]  # type: ignore[index]
    last.weight, last.bias = (nn.Parameter(p.detach().clone()) for p in (last.weight, last.bias))
    return blocks


def frozen(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width): nothing of the first is trained, and of the third only the bias."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
    blocks[0].requires_grad_(False)
    blocks[2][0].weight.requires_grad_(False)
    return list(blocks)


def batch_norms(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width), two with batch norm: one with momentum, one that averages all."""
    return [
        nn.Sequential(nn.BatchNorm1d(width, momentum=0.3), nn.Linear(width, width), nn.Tanh()),
        nn.Sequential(nn.Linear(width, width), nn.Tanh()),
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width, momentum=None), nn.Tanh()),
        nn.Linear(width, width),
    ]


class Loud(nn.Module):
    """A linear layer that works with large inputs and small weights: its weight's gradient is the first to overflow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        return torch.as_tensor(self.linear(2000.0 * x))


def loud(*, width: int = 8) -> list[nn.Module]:
    """Four blocks (B, width) -> (B, width), of which the second is loud."""
    quiet = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return [quiet[0], Loud(width), *quiet[1:]]
