"""Backward: 2BP's split of autograd's own backward (2024), for any module.

In a microbatch's forward, a call with a parameter as its weight is replaced where `operations` has a rule for it. The
backward of such a call (p1) computes the gradient of the input, and keeps the input and the output's gradient. From
these, p2 later computes the gradients of weight and bias. All other parameters get their gradients in p1, as usual.

    forward under the split      y = x W^T         keeps the graph
    backward-p1                  dx = dy W         keeps x, dy and the Parameter W; the graph is gone
    backward-p2                  dW += dy^T x      keeps nothing

A weight that the model computes from its parameters alone (weight norm, a parametrization) becomes a parameter for one
microbatch. p2 completes its gradient, and then propagates it to those parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList

from pipeplan.errors import RunFailedError
from worker_agent.engine.operations import RULES, Call, Operation, Rows
from worker_agent.engine.recurrent import written_out
from worker_agent.models.values import leaves_of

CopyOf = Callable[[Tensor, torch.dtype], Tensor]
"""Gives a copy of a parameter in another type."""

Added = Callable[[nn.Parameter], None]
"""Called with a parameter after something has been added to its gradient."""


def _seen_inside(function: Any) -> Callable[..., Any] | None:
    """A copy of one of torch's Python functions that does not itself check for arguments of a tensor subclass.

    The calls inside it still check, so the split intercepts them. None if the function has no such check.
    """
    code = getattr(function, "__code__", None)
    if code is None or "has_torch_function" not in code.co_names:
        return None
    known = function.__globals__ | {"has_torch_function": lambda _: False}
    inside = FunctionType(code, known, function.__name__, function.__defaults__, function.__closure__)
    inside.__kwdefaults__ = function.__kwdefaults__
    return inside


_attention = _seen_inside(functional.multi_head_attention_forward)


@dataclass(slots=True)
class Deferred:
    """A call whose weight's gradient is still to be computed. `bias` is None unless it is trained."""

    operation: Operation
    x: Tensor
    gradient: Tensor
    weight: Tensor
    bias: Tensor | None
    x_version: int

    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(own for own in (self.weight, self.bias) if isinstance(own, nn.Parameter))

    def storages(self) -> dict[int, int]:
        """The memory that it keeps alive: bytes by address."""
        kept = (self.x.untyped_storage(), self.gradient.untyped_storage())
        return {storage.data_ptr(): storage.nbytes() for storage in kept}

    def rows(self) -> Rows:
        """Input and output gradient as rows. Raises RunFailedError if the input has been changed since."""
        if self.x._version != self.x_version:
            raise RunFailedError(
                "the model changed a layer's input in place after the backward; 2BP needs it until the weights' "
                "gradients are computed: clone it before it is changed"
            )
        return self.operation.rows(self.x, self.gradient)


@dataclass(slots=True)
class Computed:
    """A weight that the model computed from parameters, with its graph, and the leaf that stands in for it."""

    value: Tensor
    stand_in: "StandIn"
    sources: tuple[Tensor, ...]

    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(source for source in self.sources if isinstance(source, nn.Parameter))

    def storages(self) -> dict[int, int]:
        """The computed weight's own memory, which it keeps alive: bytes by address."""
        storage = self.value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}


class Waiting(nn.Parameter):
    """The class of a weight while a split is active: it intercepts the calls that the weight takes part in.

    Other calls cost nothing. The weight stays the same object, the leaf of its weight version: only its class changes.
    A vector keeps its class: it waits as the bias of an intercepted call, and norms run as they are.
    """

    active_split: "Split"  # no tensor has an attribute of this name

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `func`, or the form of it that defers the weight's gradient."""
        named = kwargs or {}
        if func is functional.multi_head_attention_forward and _attention is not None:
            return _attention(*args, **named)
        # without a graph, or inside functorch's transforms, there is nothing to split
        splits = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        instead = written_out(func, args) if splits and not named else None
        if instead is not None and not torch.is_autocast_enabled("cpu"):
            return instead(*args)
        with torch._C.DisableTorchFunctionSubclass():
            rule, call = RULES.get(func), None
            if rule is not None and splits:
                call = rule(*args, **named)
            elif func is torch._weight_norm and type(args[0]) in _WAITING:
                return args[0].active_split.stand_in_for(func(*args, **named))
            elif func is torch.autograd.grad:
                require_not_computed_of(args, named)
            if call is None or not _can_wait(call):
                return func(*args, **named)
            split: Split = call.weight.active_split  # type: ignore[attr-defined]
            x, *copies = split.cast(call)
            return _Deferring.apply(split, call.operation, x, call.weight, call.bias, *copies)  # type: ignore[no-untyped-call]


class StandIn(Tensor):
    """A leaf for a weight that the model computed. It is no Parameter: modules would register one."""

    active_split: "Split"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As a waiting parameter."""
        return Waiting.__torch_function__(func, types, args, kwargs)


_WAITING = (Waiting, StandIn)


def _can_wait(call: Call) -> bool:
    """Whether the gradients of weight and bias may wait, and whether the formulas hold for the call's tensors."""
    split, bias = getattr(call.weight, "active_split", None), call.bias
    if torch.is_autocast_enabled(call.x.device.type):  # a call then casts its tensors first, except float64
        castable = [own.is_floating_point() and own.dtype is not torch.float64 for own in call.tensors()]
        if not all(castable):
            return False
    return (
        split is not None
        and (bias is None or not bias.requires_grad or split.may_leave_out(bias))
        and type(call.x) in (Tensor, nn.Parameter, *_WAITING)
        and call.x.layout is torch.strided
        and not call.x.is_nested
        and not call.x.is_complex()
        and call.x.numel() > 0
    )


class Split:
    """The split of one microbatch's backward, for the given parameters that have no hooks.

    Weights that `parametrizations` compute from such parameters alone are split as well. Under autocast a call takes
    its tensors in 16 bits, as it would without the split; `copy_of` gives such copies of parameters (default: a new one
    for each call).

    A hook needs the gradient at once. The split must be active in the microbatch's forward, and with `deferring` in its
    p1: only p1 may defer gradients, not a backward that the model runs inside its forward.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        parametrizations: Sequence[ParametrizationList] = (),
        *,
        copy_of: CopyOf | None = None,
    ) -> None:
        self.deferred: list[Deferred | Computed] = []
        self.deferring = False
        self._copy_of = copy_of
        self._parametrizations = tuple(parametrizations)
        own = [
            parameter
            for parameter in parameters
            if type(parameter) is nn.Parameter
            and parameter.requires_grad
            and parameter.is_leaf
            and not parameter._backward_hooks
            and not getattr(parameter, "_post_accumulate_grad_hooks", None)
        ]
        self._own = {id(parameter): parameter for parameter in own}
        sources = {id(parameter) for each in self._parametrizations for parameter in each.parameters()}
        self._intercepting = [parameter for parameter in own if parameter.dim() != 1 or id(parameter) in sources]

    @contextmanager
    def active(self, *, deferring: bool) -> Iterator[None]:
        """Replaces calls with the parameters as weights while the context is active."""
        self.deferring = deferring
        for parameter in self._intercepting:
            parameter.__class__ = Waiting
            parameter.active_split = self  # type: ignore[attr-defined]
        hooks = [
            each.register_forward_hook(lambda _m, _i, out: self.stand_in_for(out)) for each in self._parametrizations
        ]
        try:
            yield
        finally:
            self.deferring = False
            for hook in hooks:
                hook.remove()
            for parameter in self._intercepting:
                parameter.__class__ = nn.Parameter
                del parameter.active_split  # type: ignore[attr-defined]

    def may_leave_out(self, bias: Tensor) -> bool:
        """Whether the bias of an intercepted call may get its gradient later."""
        return id(bias) in self._own or type(bias) is StandIn

    def cast(self, call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The call's input as autocast casts it; copies of weight and bias, None where they need none."""
        device_type = call.x.device.type
        if not torch.is_autocast_enabled(device_type):
            return call.x, None, None
        dtype = torch.get_autocast_dtype(device_type)
        return call.x.to(dtype), self._copied(call.weight, dtype), self._copied(call.bias, dtype)

    def _copied(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if weight is None or weight.dtype is dtype:
            return None
        if self._copy_of is None or not isinstance(weight, nn.Parameter):
            return weight.detach().to(dtype)
        return self._copy_of(weight, dtype)

    def stand_in_for(self, value: Any) -> Any:
        """A leaf in place of a value computed from waiting parameters alone. Any other value is returned unchanged."""
        if type(value) is not Tensor or value.grad_fn is None or torch._C._are_functorch_transforms_active():
            return value
        sources = leaves_of([value])
        if not sources or any(type(source) not in _WAITING for source in sources):
            return value
        stand_in: StandIn = value.detach().as_subclass(StandIn)
        stand_in.requires_grad_().active_split = self  # type: ignore[attr-defined]
        self.deferred.append(Computed(value, stand_in, sources))
        return stand_in


def parametrizations_of(blocks: Iterable[nn.Module]) -> tuple[ParametrizationList, ...]:
    """The parametrizations that compute weights in some blocks, each once."""
    modules = dict.fromkeys(module for block in blocks for module in block.modules())
    return tuple(module for module in modules if isinstance(module, ParametrizationList))


def require_not_computed_of(args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raises RunFailedError if a forward differentiates by a parameter from which a weight was computed.

    The graph has no path from the weight's stand-in to that parameter.
    """
    inputs = named.get("inputs", args[1] if len(args) > 1 else ())
    for source in (inputs,) if isinstance(inputs, Tensor) else tuple(inputs):
        split = getattr(source, "active_split", None)
        computed = [each for each in split.deferred if isinstance(each, Computed)] if split is not None else []
        if any(source is each for one in computed for each in one.sources):
            raise RunFailedError(
                "the model differentiates by a parameter of a parametrization in its own forward; 2BP cannot split "
                "that: choose a schedule without 2BP"
            )


class _Deferring(torch.autograd.Function):
    """An operation whose backward computes only the input's gradient where the others are deferred."""

    @staticmethod
    def forward(
        ctx: Any,
        split: Split,
        operation: Operation,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        weight_copy: Tensor | None,
        bias_copy: Tensor | None,
    ) -> Tensor:
        operand = weight if weight_copy is None else weight_copy
        ctx.save_for_backward(x, operand)  # autograd then refuses tensors changed in place
        ctx.split, ctx.operation = split, operation
        ctx.weight = weight  # the leaf itself: a saved tensor may come back as another object
        ctx.bias = bias if bias is not None and bias.requires_grad else None
        ctx.is_cast = weight_copy is not None
        y = operation.output(x, operand, bias if bias_copy is None else bias_copy)
        return (
            torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
        )  # not a view: the next call may be in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            if ctx.split.deferring:
                kept = x.detach()  # x itself would keep its graph alive
                ctx.split.deferred.append(Deferred(ctx.operation, kept, gradient, ctx.weight, ctx.bias, kept._version))
                weight, of_weight, of_bias = weight if ctx.is_cast else ctx.weight, None, None
            else:
                weight = ctx.weight.to(x.dtype) if ctx.is_cast else weight  # with a graph, for a second derivative
                rows = ctx.operation.rows(x, gradient)
                of_weight = ctx.operation.weight_gradient(rows, weight, None)
                of_bias = None if ctx.bias is None else ctx.operation.bias_gradient(rows)
            of_x = ctx.operation.input_gradient(gradient, x, weight) if ctx.needs_input_grad[2] else None
        return None, None, of_x, of_weight, of_bias, None, None


@torch.no_grad()
def add_weight_gradients(
    microbatches: Iterable[list[Deferred | Computed]], *, concatenate: bool = False, added: Added = lambda _: None
) -> None:
    """Backward-p2: adds the gradients that the microbatches deferred to `.grad`, and empties their lists.

    With `concatenate`, equal calls of all microbatches are joined over their rows, for fewer and larger products;
    without it, calls are added one by one. Both equal the fused backward up to rounding. For a single microbatch they
    are equal bit for bit, except for the order in which a parameter's uses in p1 and in p2 are added up.
    `added` is called with each parameter of a call once the call's part is in the parameter's gradient.
    """
    lists = [[part for deferred in microbatches for part in _taken(deferred)]] if concatenate else None
    for parts in lists or map(_taken, microbatches):
        weights = [part for part in parts if isinstance(part, Computed)]
        calls = [part for part in parts if isinstance(part, Deferred)]
        parts.clear()
        _add_all(calls, added, joined=concatenate)
        for computed in reversed(weights):  # one may be computed from another
            if computed.stand_in.grad is not None:
                torch.autograd.backward(computed.value, computed.stand_in.grad)
            for parameter in computed.parameters():
                added(parameter)


def _taken(deferred: list[Deferred | Computed]) -> list[Deferred | Computed]:
    parts = deferred.copy()
    deferred.clear()
    return parts


def _add_all(calls: list[Deferred], added: Added, *, joined: bool) -> None:
    by_weight: dict[Tensor, list[Deferred]] = {}
    for call in calls:
        by_weight.setdefault(call.weight, []).append(call)
    calls.clear()
    for weight in list(by_weight):
        uses = by_weight.pop(weight)
        parts = list(_join(uses)) if joined else [(call, call.rows()) for call in uses]
        biases: dict[Tensor, list[Tensor]] = {}
        for call, rows in parts:
            if call.bias is not None:
                biases.setdefault(call.bias, []).append(call.operation.bias_gradient(rows))
        for bias, gradients in biases.items():
            _add(bias, *gradients)
        if len(parts) == 1 and weight.grad is not None and weight.grad.dtype == parts[0][1][1].dtype:
            call, rows = parts[0]
            call.operation.weight_gradient(rows, weight, weight.grad)
        else:
            _add(weight, *(call.operation.weight_gradient(rows, weight, None) for call, rows in parts))
        for parameter in [parameter for call in uses for parameter in call.parameters()]:
            added(parameter)


def _join(uses: list[Deferred]) -> Iterator[tuple[Deferred, Rows]]:
    """The calls of one weight. Calls that fit together become one call with the rows of all."""
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


def _add(parameter: Tensor, gradient: Tensor, *others: Tensor) -> None:
    """Adds the sum to a parameter's gradient, which has the parameter's memory layout."""
    for other in others:
        gradient = gradient + other
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype).copy_(gradient)
