"""Operations: calls with a weight whose two gradients, of the input and of the weight, can be computed separately.

A rule reads the arguments of one torch function and returns the call that they make, or None where it is of another
kind. The formulas are autograd's own: splitting changes no bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Rows = tuple[Tensor, Tensor]
"""The input and the output's gradient of a call. Several calls may be joined over the first dimension."""


class Operation(Protocol):
    """A function of an input, a weight and perhaps a bias. Operations that are equal may be joined over their rows."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The call's result."""

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the input, from that of the output: backward-p1."""

    def rows(self, x: Tensor, gradient: Tensor) -> Rows:
        """The input and the output's gradient as rows."""

    def weight_gradient(self, rows: Rows, weight: Tensor, onto: Tensor | None) -> Tensor:
        """The gradient of the weight, added to `onto` in place if that is given: backward-p2."""

    def bias_gradient(self, rows: Rows) -> Tensor:
        """The gradient of the bias: backward-p2."""


class Call(NamedTuple):
    """One call of an operation."""

    operation: Operation
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """The input, the weight and, if there is one, the bias."""
        return (self.x, self.weight) if self.bias is None else (self.x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W + b, or x W^T + b where `transposed`, for an input (..., in); x W + b takes an input (rows, in)."""

    transposed: bool

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., out)."""
        if self.transposed:
            return functional.linear(x, weight, bias)
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """(..., in)."""
        return _flat(gradient).mm(weight if self.transposed else weight.t()).view(x.shape)

    def rows(self, x: Tensor, gradient: Tensor) -> Rows:
        """(rows, in) and (rows, out)."""
        return _flat(x), _flat(gradient)

    def weight_gradient(self, rows: Rows, weight: Tensor, onto: Tensor | None) -> Tensor:
        """(in, out), or (out, in) where `transposed`."""
        left, right = reversed(rows) if self.transposed else rows
        return left.t().mm(right) if onto is None else onto.addmm_(left.t(), right)

    def bias_gradient(self, rows: Rows) -> Tensor:
        """(out)."""
        return rows[1].sum(0)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution, transposed or not, of a batch (B, in, ...). Settings have one number for each dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(B, out, ...)."""
        return torch.convolution(x, weight, bias, *self._settings())

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """(B, in, ...)."""
        of_input: Tensor = self._gradients(gradient, x, weight, [True, False, False])[0]
        return of_input

    def rows(self, x: Tensor, gradient: Tensor) -> Rows:
        """As they are: samples are the rows."""
        return x, gradient

    def weight_gradient(self, rows: Rows, weight: Tensor, onto: Tensor | None) -> Tensor:
        """Shaped as the weight."""
        x, gradient = rows
        weight = weight if weight.dtype is x.dtype else torch.empty_like(weight, dtype=x.dtype)  # for its shape alone
        of_weight: Tensor = self._gradients(gradient, x, weight, [False, True, False])[1]
        return of_weight if onto is None else onto.add_(of_weight)

    def bias_gradient(self, rows: Rows) -> Tensor:
        """(out)."""
        gradient = rows[1]
        return gradient.sum([0, *range(2, gradient.dim())])

    def _gradients(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(gradient, x, weight, None, *self._settings(), wanted)

    def _settings(self) -> tuple[Any, ...]:
        return (self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups)


_LINEAR, _PRODUCT = Product(transposed=True), Product(transposed=False)


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    return Call(_LINEAR, input, weight, bias) if weight.dim() == 2 and input.dim() > 1 else None


def _matmul(input: Tensor, other: Any) -> Call | None:
    fits = isinstance(other, Tensor) and other.dim() == 2 and input.dim() > 1
    return Call(_PRODUCT, input, other) if fits else None


def _mm(input: Tensor, mat2: Tensor, **others: Any) -> Call | None:
    return None if others else _matmul(input, mat2)


def _addmm(input: Tensor, mat1: Any, mat2: Any = None, *others: Any, **named: Any) -> Call | None:
    plain = isinstance(mat1, Tensor) and isinstance(mat2, Tensor) and not others and not named
    return Call(_PRODUCT, mat1, mat2, input) if plain and input.dim() == 1 else None


def _convolution(dimensions: int, *, transposed: bool = False) -> Callable[..., Call | None]:
    order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")

    def rule(input: Tensor, weight: Tensor, bias: Tensor | None = None, *settings: Any, **named: Any) -> Call | None:
        usual = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
        chosen = usual | dict(zip(("stride", "padding", *order), settings, strict=False)) | named
        if input.dim() != dimensions + 2 or isinstance(chosen["padding"], str):
            return None
        groups = chosen.pop("groups")
        listed = {name: (value,) if isinstance(value, int) else tuple(value) for name, value in chosen.items()}
        each = {name: values * dimensions if len(values) == 1 else values for name, values in listed.items()}
        return Call(Convolution(**each, transposed=transposed, groups=groups), input, weight, bias)

    return rule


RULES: dict[Callable[..., Any], Callable[..., Call | None]] = {
    functional.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    functional.conv1d: _convolution(1),
    functional.conv2d: _convolution(2),
    functional.conv3d: _convolution(3),
    functional.conv_transpose1d: _convolution(1, transposed=True),
    functional.conv_transpose2d: _convolution(2, transposed=True),
    functional.conv_transpose3d: _convolution(3, transposed=True),
}
"""The functions that are split. A parameter of any other function gets its gradient in backward-p1."""
