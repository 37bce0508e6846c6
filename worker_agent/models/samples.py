"""Samples: a table of samples, read one microbatch at a time."""

from collections.abc import Callable
from math import gcd
from typing import Any

from torch import Tensor, arange

from pipeplan.errors import require_count

Read = Callable[[Tensor], tuple[Any, Tensor]]
"""Sample numbers (b,) -> inputs, a tensor or several, and targets with b rows."""


class Samples:
    """`count` samples as microbatches: microbatch i holds the samples [i * b, (i + 1) * b) modulo the count.

    The length is the number of microbatches after which they repeat. No sample is left out for any b.
    """

    def __init__(self, read: Read, *, count: int, microbatch_size: int) -> None:
        require_count("data.samples", count)
        require_count("microbatch_size", microbatch_size)
        self._read = read
        self._count = count
        self._microbatch_size = microbatch_size

    def __len__(self) -> int:
        return self._count // gcd(self._count, self._microbatch_size)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        start = index * self._microbatch_size
        return self._read(arange(start, start + self._microbatch_size) % self._count)
