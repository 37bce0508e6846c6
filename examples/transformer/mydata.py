"""Tokens for the decoder: every sequence counts upwards from a random start."""

from collections.abc import Iterator

import torch
from torch import Tensor


def batches(
    *, microbatch_size: int, seed: int, vocabulary: int = 64, length: int = 16
) -> Iterator[tuple[Tensor, Tensor]]:
    """Microbatches of sequences (B, T), and for each place the token that comes next."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(vocabulary, (microbatch_size, 1), generator=generator)
        tokens = (start + torch.arange(length + 1)) % vocabulary
        yield tokens[:, :-1], tokens[:, 1:]
