"""Backward: 2BP's split of autograd's own backward (2024), for any module.

A function mode watches a microbatch's forward and replaces the calls that `operations` has rules for. Their backward
gives the gradient of the input, and notes input and output gradient: with these, later, p2 computes the gradients of
weight and bias. All other parameters get their gradients in p1, as they always do.

    forward under the split      y = x W^T         keeps the graph
    backward-p1                  dx = dy W         keeps x, dy and the Parameter W; the graph is gone
    backward-p2                  dW += dy^T x      keeps nothing
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from planner_service.core.errors import RunFailedError
from worker_agent.runtime.operations import RULES, Call, Operation, Rows


@dataclass(frozen=True, slots=True)
class Deferred:
    """A call whose weight's gradient is still to be computed. `bias` is there if it is trained."""

    operation: Operation
    x: Tensor
    gradient: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    x_version: int

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


class Split(TorchFunctionMode):
    """One microbatch's split: to be active in its forward, and in its p1, for models that recompute parts in there."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: list[Deferred] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `func`, or the form of it that defers its weight's gradient."""
        named = kwargs or {}
        rule = RULES.get(func)
        if rule is not None and _splits_here():
            call = rule(*args, **named)
            if call is not None and _can_wait(call):
                return _Deferring.apply(self.deferred, call.operation, call.x, call.weight, call.bias)  # type: ignore[no-untyped-call]
        elif func in _MADE_OF_OTHERS and _step_into is not None:
            with self:
                return _step_into(func, types, args, named)
        return func(*args, **named)


_MADE_OF_OTHERS = frozenset({functional.multi_head_attention_forward, torch.autograd.backward})
"""Functions inside which there are calls to be seen: projections, and what a model recomputes in its backward."""

_step_into: Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], Any] | None = getattr(
    torch._C, "_skip_one_hop_torch_function", None
)
"""Calls a function so that a mode sees what is called inside it. Early releases of torch cannot."""


def _splits_here() -> bool:
    """Not without a graph, and not inside functorch's transforms."""
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


def _can_wait(call: Call) -> bool:
    """Whether the weight's gradient is nobody's business but the update's, and the formulas hold."""
    bias = call.bias
    return (
        _is_waiting_leaf(call.weight)
        and (bias is None or not bias.requires_grad or _is_waiting_leaf(bias))
        and type(call.x) in (Tensor, nn.Parameter)
        and call.x.layout is torch.strided
        and not call.x.is_complex()
        and call.x.numel() > 0
        and not torch.is_autocast_enabled(call.x.device.type)  # there a call casts its arguments first
    )


def _is_waiting_leaf(tensor: Tensor) -> bool:
    """A trained parameter without hooks: those want the gradient when the backward comes to it."""
    return (
        type(tensor) is nn.Parameter
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._backward_hooks
        and not getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


class _Deferring(torch.autograd.Function):
    """An operation whose backward computes the input's gradient alone."""

    @staticmethod
    def forward(
        ctx: Any, deferred: list[Deferred], operation: Operation, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # saved, so that autograd refuses what was changed in place
        ctx.deferred, ctx.operation = deferred, operation
        ctx.weight, ctx.bias = (
            weight,
            bias if bias is not None and bias.requires_grad else None,
        )  # the leaves themselves
        y = operation.output(x, weight, bias)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # what comes next may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None, None, None]:
        x = ctx.saved_tensors[0].detach()  # else it would keep the graph that it comes from
        ctx.deferred.append(Deferred(ctx.operation, x, gradient, ctx.weight, ctx.bias, x._version))
        wanted = ctx.needs_input_grad[2]
        return None, None, ctx.operation.input_gradient(gradient, x, ctx.weight) if wanted else None, None, None


@torch.no_grad()
def add_weight_gradients(microbatches: Iterable[list[Deferred]], *, concatenate: bool = False) -> None:
    """Backward-p2: adds to `.grad` what the microbatches deferred, and empties their lists.

    In a loop the sums are those of the fused backward, in its order. With `concatenate` equal calls of all
    microbatches are joined over their rows, for fewer and larger products: equal up to rounding.
    """
    if concatenate:
        _add_all([call for deferred in microbatches for call in _taken(deferred)], joined=True)
        return
    for deferred in microbatches:
        _add_all(_taken(deferred), joined=False)


def _taken(deferred: list[Deferred]) -> list[Deferred]:
    calls = deferred.copy()
    deferred.clear()
    return calls


def _add_all(calls: list[Deferred], *, joined: bool) -> None:
    by_weight: dict[nn.Parameter, list[Deferred]] = {}
    for call in calls:
        by_weight.setdefault(call.weight, []).append(call)
    calls.clear()
    for weight in list(by_weight):
        uses = by_weight.pop(weight)
        parts = list(_join(uses) if joined else ((call, call.rows()) for call in uses))
        gradients = [
            call.operation.weight_gradients(rows, weight, biased=call.bias is not None) for call, rows in parts
        ]
        _add(weight, [of_weight for of_weight, _ in gradients])
        for bias in dict.fromkeys(call.bias for call, _ in parts if call.bias is not None):
            _add(
                bias,
                [g for (call, _), (_, g) in zip(parts, gradients, strict=True) if call.bias is bias and g is not None],
            )


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


def _add(parameter: nn.Parameter, gradients: Sequence[Tensor]) -> None:
    """Adds a sum to a parameter's gradient, which lies in memory as the parameter does."""
    total, *others = gradients
    for gradient in others:
        total = total + gradient
    if parameter.grad is not None:
        parameter.grad.add_(total)
    elif total.stride() == parameter.stride():
        parameter.grad = total
    else:
        parameter.grad = torch.empty_like(parameter).copy_(total)
