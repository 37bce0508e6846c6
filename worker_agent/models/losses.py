"""Losses: what the last stage minimises, a mean over the microbatch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.spec import load_factory, misfit, parse_spec

Loss = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> a scalar."""


def build_loss(spec: str | None) -> Loss:
    """The loss that a SPEC names, by default `default_loss`.

    The callable may be the loss itself, `loss(outputs, targets, **options)`, or a factory of it: it is a factory if it
    can be called with the options alone. So both `torch.nn.functional:mse_loss` and `torch.nn:CrossEntropyLoss` work.
    Raises InvalidInputError if it can be called neither way.
    """
    if spec is None:
        return default_loss
    parsed = parse_spec(spec, field="loss")
    found = load_factory(parsed, field="loss")
    if misfit(found, **parsed.options) is None:
        built: Loss = found(**parsed.options)
        require(callable(built), "loss", f"must be a loss or a factory of one, but {parsed.target} gave", built)
        rule = "must have no weights of its own, which nobody would train: give them to the model's last block"
        for name, parameter in built.named_parameters() if isinstance(built, nn.Module) else ():
            require(not parameter.requires_grad, "loss", rule, name)
        return built
    reason = misfit(found, None, None, **parsed.options)
    require(reason is None, "loss", f"must be callable as {parsed.target}(outputs, targets) ({reason})", spec)
    return partial(found, **parsed.options)


def default_loss(outputs: Any, targets: Any) -> Tensor:
    """Cross entropy where targets are whole numbers, the mean squared error where they are not.

    Cross entropy takes logits (..., classes) and targets (...), a mean over all that is not -100; types of 16 bits are
    computed in float32. Targets (tokens, labels, microbatches) make it the microbatch's part of the mean over a batch
    that has so many labels in so many microbatches: the mean of the parts is the mean over the batch. Raises
    InvalidInputError for several outputs or shapes that do not fit.
    """
    whole = None
    if isinstance(targets, tuple) and len(targets) == 3 and targets[1].dim() == targets[2].dim() == 0:
        targets, *whole = targets
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        kind = type(targets if isinstance(outputs, Tensor) else outputs).__name__
        raise InvalidInputError("loss", "must be named where outputs or targets are not one tensor", kind)
    if outputs.dtype in (torch.bfloat16, torch.float16):
        outputs = outputs.float()
    if targets.is_floating_point():
        _require_shape("the outputs", tuple(outputs.shape), targets)
        return functional.mse_loss(outputs, targets.to(outputs.dtype))
    _require_shape("the logits without their last dimension", tuple(outputs.shape[:-1]), targets)
    logits, labels = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1).long()
    if whole is None:
        return functional.cross_entropy(logits, labels)
    part: Tensor = functional.cross_entropy(logits, labels, reduction="sum") * whole[1] / whole[0]
    return part


def mean_of_squares(outputs: Any, targets: Any) -> Tensor:
    """A loss that needs no targets: the mean of the squared outputs, of every floating-point tensor among them."""
    tensors = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    return torch.stack([t.float().square().mean() for t in tensors if t.is_floating_point()]).sum()


def _require_shape(what: str, shape: tuple[int, ...], targets: Tensor) -> None:
    require(
        tuple(targets.shape) == shape, "data.targets", f"must have the shape of {what}, {shape}", tuple(targets.shape)
    )
