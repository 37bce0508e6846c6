"""Backward: 2BP's split of autograd's own backward (2024), for any module.

In a microbatch's forward, a call with a parameter as its weight is replaced where `operations` has a rule for it. The
backward of such a call (p1) computes the gradient of the input, and keeps the input and the output's gradient. From
these, p2 later computes the gradients of weight and bias. All other parameters get their gradients in p1, as usual.

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
"""Called with a parameter after something has been added to its gradient."""

_step_into: Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], Any] | None = getattr(
    torch._C, "_skip_one_hop_torch_function", None
)
"""Calls a function of torch and intercepts the calls inside it. Early releases lack it and do not split attention."""


@dataclass(slots=True)
class Deferred:
    """A call whose weight's gradient is still to be computed. `bias` is None unless it is trained."""

    operation: Operation
    x: Tensor
    gradient: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    x_version: int

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters to whose gradients it adds."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def storages(self) -> dict[int, int]:
        """The memory that it keeps alive: bytes by address."""
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
    """The class of a parameter while a split is active: it intercepts the calls that the parameter takes part in.

    Other calls cost nothing. The parameter stays the same object, the leaf of its weight version: only its class
    changes.
    """

    active_split: "Split"  # no tensor has an attribute of this name

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `func`, or the form of it that defers the weight's gradient."""
        named = kwargs or {}
        if func is functional.multi_head_attention_forward and _step_into is not None:
            return _step_into(func, types, args, named)
        with torch._C.DisableTorchFunctionSubclass():
            rule, call = RULES.get(func), None
            # without a graph, or inside functorch's transforms, there is nothing to split
            if rule is not None and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
                call = rule(*args, **named)
            if call is None or not _can_wait(call):
                return func(*args, **named)
            split = call.weight.active_split  # type: ignore[attr-defined]
            return _Deferring.apply(split, call.operation, call.x, call.weight, call.bias)  # type: ignore[no-untyped-call]


def _can_wait(call: Call) -> bool:
    """Whether the gradients of weight and bias may wait, and the formulas hold for the call's tensors."""
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


class Split:
    """The split of one microbatch's backward, for those of the given parameters that have no hooks.

    A hook needs the gradient at once. The split must be active in the microbatch's forward, and with `deferring` in its
    p1: only that backward may leave gradients out, not one that a model runs inside its forward.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.deferred: list[Deferred] = []
        self.deferring = False
        self._parameters = [
            parameter
            for parameter in parameters
            if type(parameter) is nn.Parameter
            and parameter.requires_grad
            and parameter.is_leaf
            and not parameter._backward_hooks
            and not getattr(parameter, "_post_accumulate_grad_hooks", None)
        ]

    @contextmanager
    def active(self, *, deferring: bool) -> Iterator[None]:
        """Replaces calls with the parameters as weights while the context is active."""
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


class _Deferring(torch.autograd.Function):
    """An operation whose backward computes only the input's gradient where the others are deferred."""

    @staticmethod
    def forward(
        ctx: Any, split: Split, operation: Operation, x: Tensor, weight: nn.Parameter, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # autograd then refuses what was changed in place
        ctx.split, ctx.operation = split, operation
        ctx.weight = weight  # the leaf itself: a saved tensor may come back as another object
        ctx.bias = bias if bias is not None and bias.requires_grad else None
        y = operation.output(x, weight, bias)
        return (
            torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
        )  # not a view: the next call may be in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            if ctx.split.deferring:
                kept = x.detach()  # x itself would keep its graph alive
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

    With `concatenate`, equal calls of all microbatches are joined over their rows, for fewer and larger products;
    without it, calls are added one by one. Both equal the fused backward up to rounding. For a single microbatch they
    are equal bit for bit, except for the order in which a parameter's uses in p1 and in p2 are added up.
    `added` is called with each parameter of a call once the call's part is in the parameter's gradient.
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
    """The calls of one weight, those that fit together as one call with the rows of all."""
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
    """Adds the sum to a parameter's gradient, which has the parameter's memory layout."""
    for other in others:
        gradient = gradient + other
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype).copy_(gradient)
