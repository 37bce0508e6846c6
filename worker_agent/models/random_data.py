"""Random data: inputs and targets of the shapes that a model takes, for models that come without data of their own.

B samples, S and T tokens of a source and of its target, F frames of D features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.errors import require_count
from worker_agent.models.samples import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomData:
    """The random data that a chain's first block `takes`: its SPEC, and a short description."""

    data: str
    description: str


class TakesRandomData(nn.Sequential):
    """A chain's first block, and the random data that it `takes`."""

    def __init__(self, *modules: nn.Module, takes: RandomData) -> None:
        super().__init__(*modules)
        self.takes = takes


def random_images(
    *, microbatch_size: int, seed: int, size: int = 224, classes: int = 1000, samples: int = 64
) -> Samples:
    """Normal images (B, 3, size, size), and a class (B,) each."""
    require_count("data.size", size)
    require_count("data.classes", classes)
    require_count("data.samples", samples)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 3, size, size, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return Samples(lambda numbers: (images[numbers], labels[numbers]), count=samples, microbatch_size=microbatch_size)


def takes_images(size: int, classes: int) -> RandomData:
    """Random square images of this size."""
    require_count("model.image_size", size)
    require_count("model.classes", classes)
    query = f"size={size}&classes={classes}"
    return RandomData(data=f"preset:random_images?{query}", description=f"random images, {size} x {size}")


def random_translations(
    *, microbatch_size: int, seed: int, vocabulary: int = 32320, length: int = 50, samples: int = 256
) -> Samples:
    """Random sentences. Inputs are a source (B, S) and its target (B, T), targets the tokens that follow it (B, T)."""
    for name, count in {"vocabulary": vocabulary, "length": length, "samples": samples}.items():
        require_count(f"data.{name}", count)
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(vocabulary, (samples, length), generator=generator)
    target = torch.randint(vocabulary, (samples, length + 1), generator=generator)
    return _with_words(source, target, microbatch_size)


def random_videos(
    *,
    microbatch_size: int,
    seed: int,
    features: int = 4096,
    frames: int = 80,
    vocabulary: int = 46168,
    words: int = 20,
    samples: int = 16,
) -> Samples:
    """Random videos. Inputs are frames (B, F, D) and a sentence (B, T), targets the words that follow (B, T)."""
    counts = {"features": features, "frames": frames, "vocabulary": vocabulary, "words": words, "samples": samples}
    for name, count in counts.items():
        require_count(f"data.{name}", count)
    generator = torch.Generator().manual_seed(seed)
    videos = torch.randn(samples, frames, features, generator=generator)
    sentences = torch.randint(vocabulary, (samples, words + 1), generator=generator)
    return _with_words(videos, sentences, microbatch_size)


def _with_words(sources: Tensor, sentences: Tensor, microbatch_size: int) -> Samples:
    """Inputs are a source and its sentence without the last word, targets the words that follow."""

    def read(numbers: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        words = sentences[numbers]
        return (sources[numbers], words[:, :-1].contiguous()), words[:, 1:].contiguous()

    return Samples(read, count=len(sources), microbatch_size=microbatch_size)
