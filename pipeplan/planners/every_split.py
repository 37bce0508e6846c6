"""Every split: the splits of a configuration into stages, where nothing but their number is known."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Protocol


class Splits(Protocol):
    """Splits of a configuration into stages."""

    @property
    def count(self) -> float:
        """How many they are."""

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """The stops of each."""


@dataclass(frozen=True, slots=True)
class EverySplit:
    """All splits into as many stages as one of them has; listed are those of which `may` says that they may be fast."""

    one: tuple[int, ...]
    may: Callable[[tuple[int, ...]], bool]

    @property
    def count(self) -> float:
        """All, those that are not listed among them."""
        return comb(self.one[-1] - 1, len(self.one) - 1)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        blocks = self.one[-1]
        every = ((*cuts, blocks) for cuts in combinations(range(1, blocks), len(self.one) - 1))
        return filter(self.may, every)
