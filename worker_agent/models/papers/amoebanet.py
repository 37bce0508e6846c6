"""AmoebaNet-D (Real et al. 2018), as a chain of cells: the network of GPipe's table 1.

The cells are those of the authors' TensorFlow code, with which the parameters of GPipe's table come out; the paper's
figure joins other states in a normal cell. A cell passes on its output and its input: images (B, channels, ...).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeplan.errors import require
from worker_agent.models.papers import require_sizes
from worker_agent.models.papers.convolutions import convolution
from worker_agent.models.random_data import TakesRandomData, takes_images

NORMAL = (
    (1, "1x1"), (1, "average"), (1, "none"), (0, "1x7"), (0, "1x1"),
    (0, "1x7"), (2, "average"), (2, "none"), (1, "average"), (5, "1x1"),
)  # fmt: skip
"""(state, operation): two in a row are added up and become the next state; states 0 and 1 are the cell's inputs."""

REDUCTION = (
    (0, "maximum"), (0, "average"), (2, "none"), (1, "3x3"), (2, "1x7"),
    (2, "average"), (3, "none"), (1, "maximum"), (2, "average"), (3, "1x1"),
)  # fmt: skip

NORMAL_JOINED, REDUCTION_JOINED = (0, 3, 4, 6), (4, 5, 6)
"""The states that are a cell's output."""


def amoebanet_d(*, layers: int = 18, filters: int = 208, image_size: int = 224, classes: int = 1000) -> list[nn.Module]:
    """AmoebaNet-D (layers, filters): (18, 208) by default, as in GPipe's table 1. Images of 32 x 32 or larger.

    Blocks: a stem, two reducing cells, thrice a third of the layers with a reducing cell between, and a classifier.
    """
    require_sizes({"layers": layers, "filters": filters, "classes": classes})
    require(layers % 3 == 0, "model.layers", "must be a multiple of 3", layers)
    require(filters % 16 == 0, "model.filters", "must be a multiple of 16", filters)
    require(image_size >= 32, "model.image_size", "must be at least 32", image_size)
    channels = filters // 4
    stem = TakesRandomData(
        nn.ReLU(), *convolution(3, channels, 3, stride=2, padding=1), takes=takes_images(image_size, classes)
    )
    third = [False] * (layers // 3)
    kinds = [True, True, *third, True, *third, True, *third]
    cells, width = zip(*cells_of(kinds, channels), strict=True)
    return [stem, *cells, Classifier(width[-1], classes)]


def cells_of(kinds: list[bool], channels: int) -> Iterator[tuple[nn.Module, int]]:
    """Every cell, reducing or not, with the channels that it gives. Reducing doubles the channels of its states."""
    earlier = before = channels
    halved = False
    for reducing in kinds:
        channels *= 1 + reducing
        cell = Cell(earlier, before, channels, reducing=reducing, halved=halved)
        earlier, before, halved = before, channels * len(cell.joined), reducing
        yield cell, before


class Cell(nn.Module):
    """Ten operations on the outputs of the cell before and of the one before that.

    `halved`: the cell before has halved the image.
    """

    def __init__(self, earlier: int, before: int, channels: int, *, reducing: bool, halved: bool) -> None:
        super().__init__()
        self.wiring = tuple(state for state, _ in (REDUCTION if reducing else NORMAL))
        self.joined = REDUCTION_JOINED if reducing else NORMAL_JOINED
        self.enter = _step(before, channels, 1)
        self.enter_earlier: nn.Module = nn.Identity()
        if halved:
            self.enter_earlier = Halving(earlier, channels)
        elif earlier != channels:
            self.enter_earlier = _step(earlier, channels, 1)
        self.operations = nn.ModuleList(
            operation_of(kind, channels, stride=2 if reducing and state < 2 else 1)
            for state, kind in (REDUCTION if reducing else NORMAL)
        )

    def forward(self, before: Tensor, earlier: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The previous cell's output and its input -> this cell's output and its input. The stem has only an output."""
        states = [self.enter(before), self.enter_earlier(before if earlier is None else earlier)]
        for place in range(0, len(self.wiring), 2):
            left, right = (self.operations[i](states[self.wiring[i]]) for i in (place, place + 1))
            states.append(left + right)
        return torch.cat([states[state] for state in self.joined], dim=1), before


class Halving(nn.Module):
    """Halves an image by two convolutions, of which one sees the pixels that the other skips."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(before, after // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(before, after - after // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, size, size) -> (B, after, size / 2, size / 2)."""
        x = x.relu()
        shifted = nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat((self.even(x), self.odd(shifted)), dim=1))  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """A mean over the image, and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, output: Tensor, _: Tensor) -> Tensor:
        """The last cell's output (B, channels, ...) -> (B, classes)."""
        return self.linear(output.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def _step(before: int, after: int, size: int | tuple[int, int], stride: int | tuple[int, int] = 1) -> nn.Sequential:
    """A ReLU, a convolution that keeps the image's size but for its stride, and a batch norm."""
    sizes = (size, size) if isinstance(size, int) else size
    padding = (sizes[0] // 2, sizes[1] // 2)
    return nn.Sequential(nn.ReLU(), *convolution(before, after, size, stride=stride, padding=padding))


def operation_of(kind: str, channels: int, *, stride: int) -> nn.Module:
    quarter = channels // 4
    match kind:
        case "none":
            return nn.Identity() if stride == 1 else Halving(channels, channels)
        case "average":
            return nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
        case "maximum":
            return nn.MaxPool2d(2, stride=stride)
        case "1x1":
            return _step(channels, channels, 1, stride)
        case "3x3":
            middle = [_step(quarter, quarter, 3, stride)]
        case _:
            rows, columns = ((1, 7), (1, stride)), ((7, 1), (stride, 1))
            middle = [_step(quarter, quarter, size, strides) for size, strides in (rows, columns)]
    return nn.Sequential(_step(channels, quarter, 1), *middle, _step(quarter, channels, 1))
