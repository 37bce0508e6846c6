"""Models that go wrong in a profiling process."""

import os

from torch import nn

from worker_agent.models.transformer import transformer


def raising_on_the_second_rank() -> list[nn.Module]:
    if os.environ["RANK"] == "1":
        raise KeyError("the weights are not here")
    return [nn.Linear(4, 4)]


def mostly_frozen_transformer() -> list[nn.Module]:
    """A tied transformer of which the head's and the last layer's norms alone are trained."""
    blocks = transformer(hidden=32, heads=4, layers=2, vocabulary=64, sequence_length=16, tied=True)
    for block in blocks:
        block.requires_grad_(False)
    for module in (*blocks[-1].modules(), *blocks[-2].modules()):
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
    return blocks
