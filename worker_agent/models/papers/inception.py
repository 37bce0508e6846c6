"""Inception-v3 (Szegedy et al. 2015, "Rethinking the Inception Architecture", table 1), as a chain of its modules.

The auxiliary classifier is left out: it is there for training alone, and its loss would be a second output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.errors import require
from worker_agent.models.papers.convolutions import Size, convolution, scaled
from worker_agent.models.random_data import TakesRandomData, takes_images

_EPSILON = 1e-3
_ROW, _COLUMN, _SHORT_ROW, _SHORT_COLUMN = (1, 7), (7, 1), (1, 3), (3, 1)

Step = tuple[int, Size] | tuple[int, Size, int]
"""Channels, a kernel's size, and a stride; one without a stride keeps the image's size."""


class Branches(nn.Module):
    """Modules that take the same input; their outputs are joined over the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, ...) -> (B, the branches' channels together, ...)."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """The modules of Inception-v3, by the size of their images; every layer has the share `scale` of its channels."""

    scale: float

    def width(self, *channels: int) -> int:
        return sum(scaled(each, self.scale) for each in channels)

    def path(self, before: int, *steps: Step) -> nn.Sequential:
        """Convolutions in order, each followed by batch norm and a ReLU."""
        layers: list[nn.Module] = []
        for channels, size, *stride in steps:
            sizes = (size, size) if isinstance(size, int) else size
            padding = (0, 0) if stride else (sizes[0] // 2, sizes[1] // 2)
            after = self.width(channels)
            layers += convolution(before, after, size, stride=stride[0] if stride else 1, padding=padding, eps=_EPSILON)
            layers.append(nn.ReLU())
            before = after
        return nn.Sequential(*layers)

    def of_35(self, before: int, pool: int) -> Branches:
        """Of images of 35 x 35."""
        paths = ((64, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3))
        return Branches(*(self.path(before, *steps) for steps in paths), self._pooled(before, pool))

    def of_17(self, before: int, middle: int) -> Branches:
        """Of images of 17 x 17."""
        twice = (middle, 1), (middle, _COLUMN), (middle, _ROW), (middle, _COLUMN), (192, _ROW)
        once = (middle, 1), (middle, _ROW), (192, _COLUMN)
        paths = ((192, 1),), once, twice
        return Branches(*(self.path(before, *steps) for steps in paths), self._pooled(before, 192))

    def of_8(self, before: int) -> Branches:
        """Of images of 8 x 8."""
        return Branches(
            self.path(before, (320, 1)),
            self._forked(before, (384, 1)),
            self._forked(before, (448, 1), (384, 3)),
            self._pooled(before, 192),
        )

    def smaller(self, before: int, *paths: tuple[Step, ...]) -> Branches:
        """Paths that end with a stride of 2, concatenated with a maximum over 3 x 3."""
        return Branches(*(self.path(before, *steps) for steps in paths), nn.MaxPool2d(3, stride=2))

    def _pooled(self, before: int, channels: int) -> nn.Sequential:
        return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), self.path(before, (channels, 1)))

    def _forked(self, before: int, *steps: Step) -> nn.Sequential:
        forks = (self.path(self.width(384), (384, size)) for size in (_SHORT_ROW, _SHORT_COLUMN))
        return nn.Sequential(self.path(before, *steps), Branches(*forks))


def inception_v3(
    *, scale: float = 1.0, image_size: int = 299, classes: int = 1000, dropout: float = 0.5
) -> list[nn.Module]:
    """Inception-v3: 5 convolutions, 11 modules and a classifier. Images of 75 x 75 or larger."""
    require(image_size >= 75, "model.image_size", "must be at least 75", image_size)
    made = Modules(scale=scale)
    path, width = made.path, made.width
    at_35 = [width(64, 64, 96, 32), width(64, 64, 96, 64), width(64, 64, 96, 64)]
    at_17, last = width(192) * 4, width(320, 384, 384, 384, 384, 192)
    seven = (192, 1), (192, _ROW), (192, _COLUMN), (192, 3, 2)
    return [
        TakesRandomData(path(3, (32, 3, 2)), takes=takes_images(image_size, classes)),
        path(width(32), (32, 3, 1)),
        nn.Sequential(path(width(32), (64, 3)), nn.MaxPool2d(3, stride=2)),
        path(width(64), (80, 1)),
        nn.Sequential(path(width(80), (192, 3, 1)), nn.MaxPool2d(3, stride=2)),
        made.of_35(width(192), 32),
        *(made.of_35(before, 64) for before in at_35[:2]),
        made.smaller(at_35[2], ((384, 3, 2),), ((64, 1), (96, 3), (96, 3, 2))),
        made.of_17(at_35[2] + width(384, 96), 128),
        *(made.of_17(at_17, middle) for middle in (160, 160, 192)),
        made.smaller(at_17, ((192, 1), (320, 3, 2)), seven),
        made.of_8(at_17 + width(320, 192)),
        made.of_8(last),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(last, classes)),
    ]
