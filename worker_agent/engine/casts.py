"""Casts: the copies of weights in 16 bits that autocast makes.

`Casts` holds the copies of a weight version: one for each version, not one for each microbatch.
torch makes such a copy at a weight's first use within a context, and keeps it until the outermost context ends. Graphs
that share a copy keep it once. Otherwise a stage with eight microbatches in flight would hold eight copies.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@contextmanager
def keeping_casts() -> Iterator[None]:
    """While it is active, casts outlive the autocast contexts that made them, until they are forgotten."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class Casts:
    """The 16-bit copies of a stage's weights under autocast.

    `weights` gives the weights in use. `found_bytes` is the measured size of their copies. Weights that the
    model itself changes in place, between forwards or within one, are cast anew in every forward.
    """

    def __init__(self, weights: Callable[[], Iterable[Tensor]]) -> None:
        self.found_bytes = 0
        self._made = False
        self._weights = weights
        self._cast: dict[int, int] = {}
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
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

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A weight's copy for the calls that a split backward replaces. It is made at first use, as autocast's is."""
        held = self._copies.get(id(weight))
        if held is None or held[0] is not weight or held[1] != weight._version or held[2].dtype is not dtype:
            held = self._copies[id(weight)] = weight, weight._version, weight.detach().to(dtype)
        return held[2]

    @property
    def bytes(self) -> int:
        """The bytes of the copies that exist now."""
        return self.found_bytes if self._made else 0

    def weight_of(self, tensor: Tensor) -> Tensor | None:
        """The weight from whose copy alone a tensor in a graph comes; None if it does not come from one copy alone."""
        for weight, _, copy in self._copies.values():
            if tensor.data_ptr() == copy.data_ptr():
                return weight
        node, cast = tensor.grad_fn, False
        while node is not None and len(node.next_functions) == 1:
            cast = cast or node.name() == "ToCopyBackward0"
            node = node.next_functions[0][0]
            if node is not None and hasattr(node, "variable"):
                return next((weight for weight in self._weights() if cast and node.variable is weight), None)
        return None

    def forget(self) -> None:
        """Drops all copies, because the weights change."""
        torch.clear_autocast_cache()
        self._cast.clear()
        self._copies.clear()
        self._made = False

    def _changes(self) -> dict[int, int]:
        """How often each weight was written to in place."""
        return {id(weight): weight._version for weight in self._weights()}


@cache
def _casts_have_graphs() -> bool:
    """Whether a copy that was made without a graph can be used where a graph is kept.

    In early releases of torch such a copy hides its weight from the backward.
    """
    weight = torch.ones(1, 1, requires_grad=True)
    x = torch.ones(1, 1)
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        with torch.no_grad():
            torch.mm(x, weight)
        return torch.mm(x, weight).requires_grad
