"""Models that misbehave."""

import os
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


def slow_to_start(*, rank: int, depth: int = 4, width: int = 8) -> list[nn.Module]:
    """Blocks that one of the ranks never gets."""
    if os.environ["RANK"] == str(rank):
        time.sleep(3600.0)
    return [Hanging(width, None) for _ in range(depth)]
