"""Casts: under autocast, the copies of weights in 16 bits, one for each version instead of one for each microbatch.

torch makes such a copy at a weight's first use within a context and keeps it until the outermost context ends. Graphs
that share one keep it once: a stage with eight microbatches in flight would hold eight copies of its weights.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@contextmanager
def keeping_casts() -> Iterator[None]:
    """While it is active, the ends of other contexts leave the copies. Who changes weights has them forgotten."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class Casts:
    """The copies of a stage's `weights`, which gives those in use; `found_bytes` is how much they were found to take.

    Weights that the model itself changes in place, between forwards or within one, are cast anew in every forward.
    """

    def __init__(self, weights: Callable[[], Iterable[Tensor]]) -> None:
        self.found_bytes = 0
        self._made = False
        self._weights = weights
        self._cast: dict[int, int] = {}
        self._changing = False

    @contextmanager
    def using(self, device_type: str, dtype: torch.dtype) -> Iterator[None]:
        """A forward under autocast."""
        before = self._changes()
        if self._changing or any(self._cast.get(weight, changes) != changes for weight, changes in before.items()):
            self.forget()
        with torch.autocast(device_type, dtype, cache_enabled=torch.is_grad_enabled() or _casts_have_graphs()):
            yield
        self._changing = self._changing or self._changes() != before
        self._cast |= before
        self._made = True

    @property
    def bytes(self) -> int:
        """The bytes of those that are there."""
        return self.found_bytes if self._made else 0

    def holds(self, tensor: Tensor) -> bool:
        """Whether what a graph keeps was made of a weight's copy alone: views of it as a rule."""
        node, cast = tensor.grad_fn, False
        while node is not None and len(node.next_functions) == 1:
            cast = cast or node.name() == "ToCopyBackward0"
            node = node.next_functions[0][0]
            if node is not None and hasattr(node, "variable"):
                return cast and any(node.variable is weight for weight in self._weights())
        return False

    def forget(self) -> None:
        """The weights are others from now on."""
        torch.clear_autocast_cache()
        self._cast.clear()
        self._made = False

    def _changes(self) -> dict[int, int]:
        """How often each weight was written to in place."""
        return {id(weight): weight._version for weight in self._weights()}


@cache
def _casts_have_graphs() -> bool:
    """Whether a copy that is made where no graph is kept can be used where one is: in early releases of torch it hides
    its weight from the backward.
    """
    weight = torch.ones(1, 1, requires_grad=True)
    x = torch.ones(1, 1)
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        with torch.no_grad():
            torch.mm(x, weight)
        return torch.mm(x, weight).requires_grad
