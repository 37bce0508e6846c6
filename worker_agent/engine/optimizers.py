"""Optimizers by name, as a plan names them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeplan.documents.plan import OPTIMIZERS
from pipeplan.errors import InvalidInputError

Item = TypeVar("Item")

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

BUCKET_BYTES = 2**25
"""How many bytes of float32 gradients a step creates at a time. A larger parameter forms a step alone."""


def build_optimizer(name: str, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """torch's own optimizer, in its fused form: one pass over weights, gradients and states.

    "momentum" is SGD with momentum 0.9. Raises InvalidInputError for a name that is not known.
    """
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=learning_rate, fused=True)
        case "momentum":
            optimizer = torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9, fused=True)
            optimizer.register_step_pre_hook(_begin_momentum)
            return optimizer
        case "adam":
            return torch.optim.Adam(parameters, lr=learning_rate, fused=True)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
        case _:
            raise InvalidInputError("optimizer", f"must be one of {', '.join(OPTIMIZERS)}", name)


def _begin_momentum(optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
    """Gives weights that have their first gradient a momentum of zero.

    torch's fused step fails where some of its weights have a momentum and others do not.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def in_buckets(items: Sequence[Item], size_bytes: Callable[[Item], int]) -> Iterator[Sequence[Item]]:
    """The items in order, in runs of at most BUCKET_BYTES, or of one item."""
    start = run_bytes = 0
    for index, item in enumerate(items):
        if index > start and run_bytes + size_bytes(item) > BUCKET_BYTES:
            yield items[start:index]
            start, run_bytes = index, 0
        run_bytes += size_bytes(item)
    yield items[start:]
