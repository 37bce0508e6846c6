"""Watching: hands calls of a module's units, and of torch's functions between them, to someone else while it runs."""

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

OnUnit = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
OnFunction = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

call_module: Callable[..., Any] = nn.Module.__call__
_apply: Any = vars(torch.autograd.Function)["apply"]


class Applied:
    """The call of a function with a backward of the user's own."""

    def __init__(self, kind: Any) -> None:
        self.__name__ = kind.__name__
        self._kind = kind

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._kind.apply(*positional, **named)


class Watch(TorchFunctionMode):
    """While it is `active`, this thread's calls of units and functions go to `on_unit` and `on_function`.

    Calls inside these are not watched. `around` are the modules of the root whose forwards are running.
    """

    def __init__(self, root: nn.Module, units: Container[nn.Module], on_unit: OnUnit, on_function: OnFunction) -> None:
        super().__init__()
        self.around: list[nn.Module] = []
        self._own = set(root.modules())
        self._units = units
        self._on_unit = on_unit
        self._on_function = on_function
        self._thread = threading.get_ident()
        self._inside = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Changes how modules and functions are called, as torch.fx does while it traces, and changes it back."""

        def called(module: nn.Module, *positional: Any, **named: Any) -> Any:
            return self._called(module, positional, named)

        def applied(kind: Any, *positional: Any, **named: Any) -> Any:
            if self._passes():
                return _apply.__func__(kind, *positional, **named)
            with self._within():
                return self._on_function(Applied(kind), positional, named)

        modules: Any = nn.Module
        functions: Any = torch.autograd.Function
        modules.__call__, functions.apply = called, classmethod(applied)
        try:
            with self:
                yield
        finally:
            modules.__call__, functions.apply = call_module, _apply

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._passes():
            return func(*args, **(kwargs or {}))
        return self._on_function(func, tuple(args), dict(kwargs or {}))

    def _called(self, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._passes() or module not in self._own:
            return call_module(module, *positional, **named)
        if module in self._units:
            with self._within():
                return self._on_unit(module, positional, named)
        self.around.append(module)
        try:
            return call_module(module, *positional, **named)
        finally:
            self.around.pop()

    def _passes(self) -> bool:
        return self._inside or threading.get_ident() != self._thread

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
