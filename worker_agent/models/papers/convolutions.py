"""Convolutions: the papers' networks for images as chains, with the layers and names of their usual implementations.

`scale` multiplies the channels of all layers, and the features of the classifier. Images are (B, 3, size, size) and
logits (B, classes).
"""

from torch import Tensor, nn

from pipeplan.errors import require, require_amount
from worker_agent.models.random_data import TakesRandomData, takes_images

VGG_16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Simonyan and Zisserman 2015, table 1, column D: the channels between two poolings."""

CHANNELS_STEP = 8

Size = int | tuple[int, int]


def scaled(channels: int, scale: float) -> int:
    """The channels times the scale, a multiple of CHANNELS_STEP. Raises InvalidInputError for a scale of 0 or less."""
    require_amount("model.scale", scale)
    require(scale > 0, "model.scale", "must be above 0", scale)
    return max(1, round(channels * scale / CHANNELS_STEP)) * CHANNELS_STEP


def vgg16(*, scale: float = 1.0, image_size: int = 224, classes: int = 1000, dropout: float = 0.5) -> list[nn.Module]:
    """VGG-16: a block for each of 13 convolutions and of 3 linear layers. Images of 32 x 32 or larger."""
    require(image_size >= 32, "model.image_size", "must be at least 32", image_size)
    blocks: list[nn.Module] = []
    before = 3
    for group in VGG_16:
        for place, channels in enumerate(group, start=1):
            after = scaled(channels, scale)
            layers: list[nn.Module] = [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            if place == len(group):
                layers.append(nn.MaxPool2d(2))
            blocks.append(
                nn.Sequential(*layers) if blocks else TakesRandomData(*layers, takes=takes_images(image_size, classes))
            )
            before = after
    hidden = scaled(4096, scale)
    return [
        *blocks,
        nn.Sequential(
            nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(before * 49, hidden), nn.ReLU(), nn.Dropout(dropout)
        ),
        nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(hidden, classes),
    ]


def alexnet(*, scale: float = 1.0, image_size: int = 224, classes: int = 1000, dropout: float = 0.5) -> list[nn.Module]:
    """AlexNet on one device (Krizhevsky 2014): 5 convolutions and 3 linear layers. Images of 63 x 63 or larger."""
    require(image_size >= 63, "model.image_size", "must be at least 63", image_size)
    first, second, third, fourth = (scaled(channels, scale) for channels in (64, 192, 384, 256))
    hidden = scaled(4096, scale)
    return [
        TakesRandomData(
            nn.Conv2d(3, first, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            takes=takes_images(image_size, classes),
        ),
        nn.Sequential(nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        nn.Sequential(nn.Conv2d(second, third, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(third, fourth, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(fourth, fourth, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        nn.Sequential(
            nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(dropout), nn.Linear(fourth * 36, hidden), nn.ReLU()
        ),
        nn.Sequential(nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    ]


def resnet50(*, scale: float = 1.0, image_size: int = 224, classes: int = 1000) -> list[nn.Module]:
    """ResNet-50: a stem, 16 bottlenecks and a classifier."""
    return _resnet((3, 4, 6, 3), scale, image_size, classes)


def resnet152(*, scale: float = 1.0, image_size: int = 224, classes: int = 1000) -> list[nn.Module]:
    """ResNet-152: a stem, 50 bottlenecks and a classifier."""
    return _resnet((3, 8, 36, 3), scale, image_size, classes)


def _resnet(groups: tuple[int, ...], scale: float, image_size: int, classes: int) -> list[nn.Module]:
    """He et al. 2015, table 1. The middle convolution of a group's first bottleneck has the stride."""
    before = scaled(64, scale)
    stem = (*convolution(3, before, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    blocks: list[nn.Module] = [TakesRandomData(*stem, takes=takes_images(image_size, classes))]
    for group, repeats in enumerate(groups):
        middle = scaled(64 * 2**group, scale)
        for place in range(repeats):
            blocks.append(Bottleneck(before, middle, stride=2 if group and not place else 1))
            before = 4 * middle
    return [*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))]


def convolution(
    before: int, after: int, size: Size, *, stride: Size = 1, padding: Size = 0, eps: float = 1e-5
) -> tuple[nn.Module, nn.Module]:
    """A convolution without a bias, and the batch norm that has it."""
    layer = nn.Conv2d(before, after, size, stride=stride, padding=padding, bias=False)
    return layer, nn.BatchNorm2d(after, eps=eps)


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 with a residual (He et al. 2015, figure 5, right)."""

    def __init__(self, before: int, middle: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(before, middle, 1),
            nn.ReLU(),
            *convolution(middle, middle, 3, stride=stride, padding=1),
            nn.ReLU(),
            *convolution(middle, 4 * middle, 1),
        )
        same = stride == 1 and before == 4 * middle
        self.residual = nn.Identity() if same else nn.Sequential(*convolution(before, 4 * middle, 1, stride=stride))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, size, size) -> (B, 4 * middle, size / stride, size / stride)."""
        return self.activation(self.body(x) + self.residual(x))  # type: ignore[no-any-return]
