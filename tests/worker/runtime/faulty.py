"""Models that misbehave."""

import time

import torch
from torch import Tensor, nn


def hangs(*, after: int, depth: int = 4, width: int = 8) -> list[nn.Module]:
    """Blocks of which the first never comes back from its forward number `after`."""
    return [Hanging(width, after if index == 0 else None) for index in range(depth)]


class Hanging(nn.Module):
    """Scales its input by a weight, so often."""

    def __init__(self, width: int, after: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.left = after

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        if self.left is not None:
            self.left -= 1
            while self.left <= 0:
                time.sleep(1.0)
        scaled: Tensor = x * self.weight
        return scaled
