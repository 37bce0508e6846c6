"""Batches as Hugging Face's collators make them: mappings, padded, with labels that the loss leaves out."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]

VOCABULARY = 50


def padded(
    *, microbatch_size: int, seed: int, side: str = "right", length: int = 9, decoder: int = 0, samples: int = 24
) -> list[Batch]:
    """Sequences of 2 to `length` tokens, filled on one side; with `decoder` the labels are as long as that."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for first in range(0, samples, microbatch_size):
        tokens = torch.randint(3, VOCABULARY, (microbatch_size, length), generator=generator)
        filled = torch.tensor([(first + i) * 5 % (length - 1) for i in range(microbatch_size)])
        places = torch.arange(length) if side == "left" else torch.arange(length).flip(0)
        mask = (places >= filled[:, None]).long()
        tokens = tokens * mask
        labels = tokens.masked_fill(mask == 0, -100)
        if decoder:
            labels = torch.randint(3, VOCABULARY, (microbatch_size, decoder), generator=generator)
            labels[:, decoder // 2 :][filled > length // 2] = -100
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return batches


def masked(*, microbatch_size: int, seed: int) -> list[Batch]:
    """As for masked language: two segments, a third of the tokens to be found, and a sample without any."""
    batches = padded(microbatch_size=microbatch_size, seed=seed)
    for batch in batches:
        batch["token_type_ids"] = (torch.arange(9) > 4).long().expand(microbatch_size, -1)
        batch["labels"] = batch["labels"].masked_fill(batch["input_ids"] % 3 > 0, -100)
    batches[1]["labels"] = torch.full_like(batches[1]["labels"], -100)
    return batches


def packed(*, microbatch_size: int, seed: int) -> list[Batch]:
    """Two samples in every row, whose positions begin anew, without a mask."""
    batches = padded(microbatch_size=microbatch_size, seed=seed)
    for batch in batches:
        del batch["attention_mask"]
        batch["position_ids"] = torch.cat([torch.arange(4), torch.arange(5)]).expand(microbatch_size, -1)
    return batches


def images(*, microbatch_size: int, seed: int, size: int = 8) -> list[Batch]:
    """Pixels, and a class each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "pixel_values": torch.randn(microbatch_size, 3, size, size, generator=generator),
            "labels": torch.randint(2, (microbatch_size,), generator=generator),
        }
        for _ in range(12)
    ]


def sounds(*, microbatch_size: int, seed: int) -> list[Batch]:
    """Features of sounds, and what is said."""
    generator = torch.Generator().manual_seed(seed)
    batches = padded(microbatch_size=microbatch_size, seed=seed, decoder=6)
    for batch in batches:
        del batch["input_ids"], batch["attention_mask"]
        batch["input_features"] = torch.randn(microbatch_size, 8, 40, generator=generator)
    return batches


def streamed(**options: Any) -> Iterator[Batch]:
    """The padded batches, one after the other and once."""
    yield from padded(**options)


def broken(*, microbatch_size: int, seed: int, key: str) -> list[Any]:
    """The padded batches, with one thing wrong."""
    batches: list[Any] = padded(microbatch_size=microbatch_size, seed=seed)
    for batch in batches:
        tokens, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
        wrong: dict[str, Any] = {
            "unknown": {"sentence_ids": tokens},
            "shorter": {"attention_mask": mask[:, :-1]},
            "additive": {"attention_mask": (1 - mask) * -1000},
            "real": {"attention_mask": mask.float()},
            "list": {"attention_mask": mask.tolist()},
            "four": {"attention_mask": mask[:, None, None]},
            "ignored": {"labels": torch.full_like(labels, -100)},
            "short": {"labels": labels[:, 1:]},
            "far": {"position_ids": tokens + 1000},
        }
        if key in wrong:
            batch |= wrong[key]
        else:
            del batch[key]
    return batches
