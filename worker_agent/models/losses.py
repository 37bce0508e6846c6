"""Losses: the last stage's objective, a mean over the microbatch."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.errors import InvalidInputError, require
from worker_agent.models.spec import Spec, UserCodeError, has_signature, load_factory, misfit, parse_spec, user_code
from worker_agent.models.values import cast_in_place

Loss = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> a scalar."""


def build_loss(spec: str | None, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Loss:
    """The loss that a SPEC names, by default `default_loss`; the tensors of a module are moved and cast.

    The SPEC may name the loss itself, `loss(outputs, targets, **options)`, which may be a module instance,
    or a factory of it. A class is a factory; anything else is one if it can be called with the options alone. So
    `torch.nn.functional:mse_loss`, `torch.nn:CrossEntropyLoss` and `criterion = nn.MSELoss()` all work.
    Raises InvalidInputError if it can be called neither way.
    """
    if spec is None:
        return default_loss
    parsed = parse_spec(spec, field="loss")
    found = load_factory(parsed, field="loss")
    loss = found if _is_loss(found, parsed) else _made(found, parsed)
    options = parsed.options if loss is found else {}
    called = loss.forward if isinstance(loss, nn.Module) else loss
    reason = misfit(called, None, None, **options) if has_signature(called) else None
    require(reason is None, "loss", f"must be callable as {parsed.target}(outputs, targets) ({reason})", spec)
    if isinstance(loss, nn.Module):
        rule = "must have no weights of its own, which nobody would train: give them to the model's last block"
        for name, parameter in loss.named_parameters():
            require(not parameter.requires_grad, "loss", rule, name)
        loss.to(device or torch.device("cpu"))
        for tensor in (*loss.parameters(), *loss.buffers()):
            cast_in_place(tensor, dtype or tensor.dtype)
    return partial(loss, **options) if options else loss


def _is_loss(found: Callable[..., Any], spec: Spec) -> bool:
    """Whether a SPEC names the loss itself, and not a factory of it."""
    called: Any = found
    while isinstance(called, partial):
        called = called.func
    if isinstance(called, type):
        return False
    return isinstance(found, nn.Module) or not has_signature(found) or misfit(found, **spec.options) is not None


def _made(factory: Callable[..., Any], spec: Spec) -> Loss:
    """The loss that a factory makes; the factory itself, if it is a loss that hides its parameters behind *args."""
    hides = all(p.kind is not p.POSITIONAL_OR_KEYWORD for p in signature(factory).parameters.values())
    hides = hides and not isinstance(factory, type) and misfit(factory, None, None, **spec.options) is None
    reason = misfit(factory, **spec.options)
    require(reason is None, "loss", f"must fit the parameters of {spec.target} ({reason})", dict(spec.options))
    try:
        with user_code(f"the loss's factory {spec.target}"):
            built: Any = factory(**spec.options)
    except UserCodeError:
        if hides:
            return factory
        raise
    if hides and not callable(built):
        return factory
    rule = f"must be a loss, which requires (outputs, targets), or a factory of one, but {spec.target} gave"
    require(callable(built) and not isinstance(built, type), "loss", rule, built)
    return built  # type: ignore[no-any-return]  # checked above


def default_loss(outputs: Any, targets: Any) -> Tensor:
    """Cross entropy where targets are whole numbers, the mean squared error where they are not.

    Cross entropy takes logits (..., classes) and targets (...), a mean over all that is not -100; types of 16 bits are
    computed in float32. Targets (tokens, labels, microbatches) give the microbatch's part of the mean over a batch with
    `labels` labels in `microbatches` microbatches: the mean of the parts is the mean over the batch. Raises
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
