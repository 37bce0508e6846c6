"""Optimizers by name, as a plan names them."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from planner_service.core.errors import InvalidInputError
from planner_service.core.plan import OPTIMIZERS

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def build_optimizer(name: str, parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """torch's own optimizer, in its fused form: one pass over weights, gradients and states.

    "momentum" is SGD with momentum 0.9. Raises InvalidInputError for a name that is not known.
    """
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=learning_rate, fused=True)
        case "momentum":
            return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9, fused=True)
        case "adam":
            return torch.optim.Adam(parameters, lr=learning_rate, fused=True)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
        case _:
            raise InvalidInputError("optimizer", f"must be one of {', '.join(OPTIMIZERS)}", name)
