"""Scaled: a block's counts at a size between three that were counted, where all three lie on lines.

A size is a number of samples, or of experts that a device has. A block's operations and bytes grow by the same for
every one. So does a peak of memory while the same operation makes it: three sizes on one line, the smallest and the
largest among them, are taken to have one and the same. Where they are on no line, the size is counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from worker_agent.profiler.counts import BlockCounts
from worker_agent.profiler.operations import MatrixSizes

Layout = tuple[tuple[int, ...], tuple[int, ...], int, int, torch.dtype]
"""A tensor without contents: its shape, strides, place in its storage, the storage's elements, and the type."""

Counted = tuple[BlockCounts, tuple[Layout, ...]]
"""A block's counts and the layouts of its outputs."""


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a tensor."""
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), elements, tensor.dtype


def laid_out(layout: Layout) -> Tensor:
    """A tensor of this layout."""
    shape, stride, offset, elements, dtype = layout
    return torch.empty(elements, dtype=dtype).as_strided(shape, stride, offset)


def scaled(counted: Sequence[tuple[int, Counted]], wanted: int) -> Counted | None:
    """A block at a size between the first and the last of three; None where these are on no line."""
    sizes = [size for size, _ in counted]
    try:
        found: Counted = _on_line([each for _, each in counted], sizes, wanted)
    except _BentError:
        return None
    return found


def scaled_between(known: Mapping[int, Counted], wanted: int) -> Counted | None:
    """A block at a size between others; None where fewer than three are known, or these are on no line."""
    sizes = sorted(known)
    if len(sizes) < 3 or not sizes[0] < wanted < sizes[-1]:
        return None
    return scaled([(size, known[size]) for size in (*sizes[:2], sizes[-1])], wanted)


class _BentError(Exception):
    """Three counts are on no line."""


def _on_line(values: Sequence[Any], sizes: Sequence[int], size: int) -> Any:
    """The same value at another size: numbers on a line, all else equal."""
    first = values[0]
    if all(value == first for value in values[1:]):
        return first
    if type(first) is int:
        (x, y, z), (start, middle, end) = values, sizes
        step, rest = divmod(y - x, middle - start)
        if rest or z - x != step * (end - start):
            raise _BentError
        return x + step * (size - start)
    if isinstance(first, MatrixSizes):  # all products together grow: of twice the experts, each has half the rows
        batch, *sides = _on_line([(v.batch, v.batch * v.m, v.batch * v.n, v.batch * v.k) for v in values], sizes, size)
        if any(side % batch for side in sides):
            raise _BentError
        m, n, k = (side // batch for side in sides)
        return MatrixSizes(batch=batch, m=m, n=n, k=k)
    if isinstance(first, tuple) and len({len(value) for value in values}) == 1:
        return tuple(_on_line(parts, sizes, size) for parts in zip(*values, strict=True))
    if is_dataclass(first) and len({type(value) for value in values}) == 1:
        parts = {each.name: [getattr(value, each.name) for value in values] for each in fields(first)}
        made: Any = type(first)
        return made(**{name: _on_line(part, sizes, size) for name, part in parts.items()})
    raise _BentError
