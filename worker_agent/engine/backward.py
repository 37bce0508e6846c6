"""Backward: 2BP's split of autograd's own backward (2024), for any module.

In a microbatch's forward the parameters replace the calls that they are the weights of, where `operations` has a rule.
The backward of such a call gives the gradient of the input, and notes input and output gradient: with these, later, p2
computes the gradients of weight and bias. All other parameters get their gradients in p1, as they always do.

    forward under the split      y = x W^T         keeps the graph
    backward-p1                  dx = dy W         keeps x, dy and the Parameter W; the graph is gone
    backward-p2                  dW += dy^T x      keeps nothing
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.errors import RunFailedError
from worker_agent.engine.operations import RULES, Call, Operation, Rows

Added = Callable[[nn.Parameter], None]
"""What is told that something has been added to a parameter's gradient."""


@dataclass(slots=True)
class Deferred:
    """A call whose weight's gradient is still to be computed. `bias` is there if it is trained."""

    operation: Operation
    x: Tensor
    gradient: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    x_version: int

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those whose gradients it is a part of."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def storages(self) -> dict[int, int]:
        """The memory that it keeps: bytes by address."""
        kept = (self.x.untyped_storage(), self.gradient.untyped_storage())
        return {storage.data_ptr(): storage.nbytes() for storage in kept}

    def rows(self) -> Rows:
        """Input and output gradient as rows. Raises RunFailedError if the input is no longer what it was."""
        if self.x._version != self.x_version:
            raise RunFailedError(
                "the model changed a layer's input in place after the backward; 2BP needs it until the weights' "
                "gradients are computed: clone it before it is changed"
            )
        return self.operation.rows(self.x, self.gradient)


class Waiting(nn.Parameter):
    """What a parameter is while a split is active: calls that it takes part in are seen, and all others cost nothing.

    It is the same object all the time, with another class: the leaf of its weight version.
    """

    active_split: "Split"  # no tensor has an attribute of this name

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `func`, or the form of it that defers its weight's gradient."""
        named = kwargs or {}
        if func is functional.multi_head_attention_forward and _step_into is not None:
            return _step_into(func, types, args, named)
        with torch._C.DisableTorchFunctionSubclass():
            rule = RULES.get(func)
            call = rule(*args, **named) if rule is not None and _splits_here() else None
            if call is None or not _can_wait(call):
                return func(*args, **named)
            split = call.weight.active_split  # type: ignore[attr-defined]
            return _Deferring.apply(split, call.operation, call.x, call.weight, call.bias)  # type: ignore[no-untyped-call]


class Split:
    """One microbatch's split, of the gradients of the given parameters that have no hooks: those want them at once.

    It is to be active in the microbatch's forward, and in its p1 with `deferring`: only that backward may leave
    gradients out, not one that a model runs by itself in its forward.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.deferred: list[Deferred] = []
        self.deferring = False
        self._parameters = [p for p in parameters if _may_wait(p)]

    @contextmanager
    def active(self, *, deferring: bool) -> Iterator[None]:
        """While it is active, calls with the parameters as weights are replaced."""
        self.deferring = deferring
        for parameter in self._parameters:
            parameter.__class__ = Waiting
            parameter.active_split = self  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.deferring = False
            for parameter in self._parameters:
                parameter.__class__ = nn.Parameter
                del parameter.active_split  # type: ignore[attr-defined]


_step_into: Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], Any] | None = getattr(
    torch._C, "_skip_one_hop_torch_function", None
)
"""Calls a function of torch whose own calls are to be seen. Early releases cannot: there attention is not split."""


def _may_wait(parameter: nn.Parameter) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.is_leaf
        and not parameter._backward_hooks
        and not getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def _splits_here() -> bool:
    """Not without a graph, and not inside functorch's transforms."""
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


def _can_wait(call: Call) -> bool:
    """Whether both gradients may wait, and the formulas hold."""
    bias = call.bias
    return (
        type(call.weight) is Waiting
        and (bias is None or not bias.requires_grad or type(bias) is Waiting)
        and type(call.x) in (Tensor, nn.Parameter, Waiting)
        and call.x.layout is torch.strided
        and not call.x.is_complex()
        and call.x.numel() > 0
        and not torch.is_autocast_enabled(call.x.device.type)  # there a call casts its arguments first
    )


class _Deferring(torch.autograd.Function):
    """An operation whose backward computes the input's gradient alone, if the others are deferred."""

    @staticmethod
    def forward(
        ctx: Any, split: Split, operation: Operation, x: Tensor, weight: nn.Parameter, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # saved, so that autograd refuses what was changed in place
        ctx.split, ctx.operation = split, operation
        ctx.weight = weight  # the leaf itself: what is saved may come back as another tensor
        ctx.bias = bias if bias is not None and bias.requires_grad else None
        y = operation.output(x, weight, bias)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # what comes next may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            if ctx.split.deferring:
                kept = x.detach()  # else it would keep the graph that it comes from
                ctx.split.deferred.append(Deferred(ctx.operation, kept, gradient, ctx.weight, ctx.bias, kept._version))
                weight, of_weight, of_bias = ctx.weight, None, None
            else:
                rows = ctx.operation.rows(x, gradient)
                of_weight = ctx.operation.weight_gradient(rows, weight, None)
                of_bias = None if ctx.bias is None else ctx.operation.bias_gradient(rows)
            of_x = ctx.operation.input_gradient(gradient, x, weight) if ctx.needs_input_grad[2] else None
        return None, None, of_x, of_weight, of_bias


@torch.no_grad()
def add_weight_gradients(
    microbatches: Iterable[list[Deferred]], *, concatenate: bool = False, added: Added = lambda _: None
) -> None:
    """Backward-p2: adds to `.grad` what the microbatches deferred, and empties their lists.

    With `concatenate` equal calls of all microbatches are joined over their rows, for fewer and larger products;
    without, they are added one by one. Both equal the fused backward up to rounding; one microbatch's gradients are
    its own bit for bit, but for the order in which a parameter's uses in p1 and p2 are added up.
    `added` is called with each of a call's parameters once its part of their gradients is in.
    """
    if concatenate:
        _add_all([call for deferred in microbatches for call in _taken(deferred)], added, joined=True)
        return
    for deferred in microbatches:
        _add_all(_taken(deferred), added, joined=False)


def _taken(deferred: list[Deferred]) -> list[Deferred]:
    calls = deferred.copy()
    deferred.clear()
    return calls


def _add_all(calls: list[Deferred], added: Added, *, joined: bool) -> None:
    by_weight: dict[nn.Parameter, list[Deferred]] = {}
    for call in calls:
        by_weight.setdefault(call.weight, []).append(call)
    calls.clear()
    for weight in list(by_weight):
        uses = by_weight.pop(weight)
        parts = list(_join(uses)) if joined else [(call, call.rows()) for call in uses]
        for call, rows in parts:
            if call.bias is not None:
                _add(call.bias, call.operation.bias_gradient(rows))
        if len(parts) == 1 and weight.grad is not None and weight.grad.dtype == weight.dtype:
            call, rows = parts[0]
            call.operation.weight_gradient(rows, weight, weight.grad)
        else:
            _add(weight, *(call.operation.weight_gradient(rows, weight, None) for call, rows in parts))
        for parameter in [parameter for call in uses for parameter in call.parameters()]:
            added(parameter)


def _join(uses: list[Deferred]) -> Iterator[tuple[Deferred, Rows]]:
    """Calls of one weight that fit together, as one with the rows of all."""
    groups: dict[Any, list[tuple[Deferred, Rows]]] = {}
    for call in uses:
        x, gradient = rows = call.rows()
        key = (call.operation, id(call.bias), x.shape[1:], gradient.shape[1:], x.dtype, gradient.dtype)
        groups.setdefault(key, []).append((call, rows))
    for group in groups.values():
        (first, rows), *others = group
        if others:
            rows = torch.cat([x for _, (x, _) in group]), torch.cat([gradient for _, (_, gradient) in group])
        yield first, rows


def _add(parameter: nn.Parameter, gradient: Tensor, *others: Tensor) -> None:
    """Adds a sum to a parameter's gradient, which lies in memory as the parameter does."""
    for other in others:
        gradient = gradient + other
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype).copy_(gradient)
