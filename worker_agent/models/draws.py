"""Draws: which results of a watched forward (`flow`) are random."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Draws(TorchFunctionMode):
    """While it is active, each random result between the units is also made of a leaf of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: dict[int, Tensor] = {}
        self._inside = False

    @contextmanager
    def aside(self) -> Iterator[list[object]]:
        """While it is active, functions are a unit's own. Yields a list that has the random ones at the end."""
        counted = _Random()
        self._inside = True
        try:
            with counted:
                yield counted.found
        finally:
            self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        with _Random() as random:
            result = func(*args, **(kwargs or {}))
        if not random.found or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        leaf = torch.zeros((), requires_grad=True, dtype=result.dtype)
        self.leaves[id(leaf)] = leaf
        return result.add_(leaf) if args and result is args[0] else result + leaf


class _Random(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the random operations that are done while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found.append(func)
        return func(*args, **(kwargs or {}))
