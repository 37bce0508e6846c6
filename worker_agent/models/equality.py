"""Equality: which modules do the same with tensors that have shapes alone. Of equal calls one is enough."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

UNCOUNTED_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "_place"})
"""Attributes of Hugging Face's layers and our segments that say where in the model they are: they change no
shape and no operation."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, tuple, list, torch.dtype, type(None))
"""Attributes of these types count as equal if their texts are equal."""


class EqualCalls:
    """Calls of modules without contents. Of equal modules that get equal arguments one runs, for all of them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def result(self, module: nn.Module, given: Any, run: Callable[[], Any]) -> Any:
        """The result of `run`, which calls the module with these arguments. Errors are not cached."""
        key = signature(module), _argument(given)
        if key not in self._known:
            self._known[key] = run(), given  # arguments are known by their ids as long as they live
        return self._known[key][0]


def shape_of(tensor: Tensor) -> Hashable:
    """The key of tensors that are equal except for their contents."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def signature(block: nn.Module) -> Hashable:
    """The key of blocks that compute the same: their modules' types, tensors' shapes and settings.

    Settings are a module's own attributes: plain values by their text, others by identity, so that only the same object
    is equal. A method is that of any module.
    """
    parts: list[Hashable] = []
    for name, module in block.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = tuple((key, shape_of(tensor), tensor.requires_grad) for key, tensor in tensors)
        settings = tuple(
            (key, _setting(value))
            for key, value in vars(module).items()
            if key not in UNCOUNTED_ATTRIBUTES and key not in _OF_EVERY_MODULE
        )
        parts.append((name, type(module), shapes, settings))
    return tuple(parts)


def _argument(value: Any) -> Hashable:
    """The key of equal arguments."""
    if isinstance(value, Tensor):
        return shape_of(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_argument, value))
    if isinstance(value, Mapping):
        return type(value), tuple((key, _argument(each)) for key, each in value.items())
    return _setting(value)


def _setting(value: Any) -> Hashable:
    return repr(value) if isinstance(value, _PLAIN) else _identity(value)


def _identity(value: Any) -> Hashable:
    """The key of an attribute's value: a method of another module, or a function with equal options."""
    if isinstance(value, partial):
        return _identity(value.func), repr((value.args, value.keywords))
    return id(getattr(value, "__func__", value))
