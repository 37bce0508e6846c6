"""A small residual network as blocks, and images for it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions beside a shortcut: (B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Adds to the images what the convolutions find in them."""
        return torch.relu(images + self.inner(images))


def blocks(*, channels: int = 16, depth: int = 4, classes: int = 4) -> list[nn.Module]:
    """The blocks in order. A plan cuts between them, and options of the SPEC arrive as these arguments."""
    stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return [stem, *(Residual(channels) for _ in range(depth)), head]


def batches(*, microbatch_size: int, seed: int, size: int = 16, classes: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Microbatches of images, and the class of each: one of its quarters is brighter."""
    generator = torch.Generator().manual_seed(seed)
    half = size // 2
    while True:
        images = torch.randn(microbatch_size, 3, size, size, generator=generator)
        labels = torch.randint(classes, (microbatch_size,), generator=generator)
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = divmod(label, 2)
            image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 1
        yield images, labels
