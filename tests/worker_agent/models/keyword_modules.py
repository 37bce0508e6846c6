"""Modules whose forward takes a batch's tensors by name, and their data as Hugging Face's collators make it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 11, 8


class Layer(nn.Module):
    """Takes its mask by name, and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        mixed = self.linear(hidden).relu() * scale
        return {"hidden": hidden + (mixed if mask is None else mixed * mask)}


class Tagger(nn.Module):
    """A row of layers between an embedding and a head; labels are of their own places."""

    labels = "same"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        mask = None if attention_mask is None else attention_mask.unsqueeze(-1).to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden=hidden, mask=mask, scale=0.5)["hidden"]
        if shift is not None:
            hidden = hidden + shift.unsqueeze(-1)
        return self.head(hidden)  # type: ignore[no-any-return]


class Predictor(Tagger):
    labels = "next"


class Unsaid(Tagger):
    labels = None  # type: ignore[assignment]


class PredictorByStage(Predictor):
    by_stage = True


def mappings(*, microbatch_size: int, seed: int, keys: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The order of the keys is not the forward's; lengths change from batch to batch."""
    generator = torch.Generator().manual_seed(seed)
    number = 0
    while True:
        length = 4 + number % 3
        tokens = torch.randint(VOCABULARY, (microbatch_size, length), generator=generator)
        mask = (torch.arange(length) < torch.randint(2, length + 1, (microbatch_size, 1), generator=generator)).long()
        batch = {
            "shift": torch.randn(microbatch_size, length, generator=generator, dtype=torch.float64),
            "attention_mask": mask,
            "labels": tokens.masked_fill(mask == 0, -100),
            "input_ids": tokens,
        }
        yield {key: batch[key] for key in keys or batch}
        number += 1


def without_masks_later(*, microbatch_size: int, seed: int) -> Iterator[Any]:
    first, second, *_ = zip(mappings(microbatch_size=microbatch_size, seed=seed), range(2), strict=False)
    yield first[0]
    yield {key: value for key, value in second[0].items() if key != "attention_mask"}


def pair_later(*, microbatch_size: int, seed: int) -> Iterator[Any]:
    batch = next(mappings(microbatch_size=microbatch_size, seed=seed))
    yield batch
    yield batch["input_ids"], batch["labels"]
