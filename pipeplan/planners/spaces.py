"""Spaces: a planner's interfaces for a search by play: configurations, their bounds, and their splits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import comb
from typing import Protocol

from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.problem import CutGraph


class Splits(Protocol):
    """Splits of a configuration into stages."""

    @property
    def count(self) -> float:
        """Their number."""

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """The stops of each."""

    def highest(self, count: int) -> Sequence[tuple[float, tuple[int, ...]]]:
        """At most `count` of those with the highest bounds, the highest first, each with its bound; none if there are
        more and finding them requires listing all.
        """


@dataclass(frozen=True, slots=True)
class EverySplit:
    """All splits into as many stages as `one` has; only those with `most` above a rate are listed. Of very many, the
    highest are looked for among `some`.
    """

    one: tuple[int, ...]
    most: Callable[[tuple[int, ...]], float]
    above: float
    some: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> float:
        """The number of all splits, listed or not."""
        return comb(self.one[-1] - 1, len(self.one) - 1)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (stops for _, stops in self._bounded())

    def highest(self, count: int) -> Sequence[tuple[float, tuple[int, ...]]]:
        """All of them if they are at most `count`, else some."""
        return sorted(self._bounded(every=self.count <= count), key=lambda each: -each[0])[:count]

    def _bounded(self, *, every: bool = True) -> Iterator[tuple[float, tuple[int, ...]]]:
        cuts = combinations(range(1, self.one[-1]), len(self.one) - 1) if every else ()
        splits = chain(((*each, self.one[-1]) for each in cuts), () if every else self.some)
        return ((most, stops) for stops in splits if (most := self.most(stops)) > self.above)


@dataclass(frozen=True, slots=True)
class ListedSplits:
    """Splits that were listed already, each with its bound, the highest first."""

    listed: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def count(self) -> float:
        """Their number."""
        return len(self.listed)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (stops for _, stops in self.listed)

    def highest(self, count: int) -> Sequence[tuple[float, tuple[int, ...]]]:
        """The first `count`."""
        return self.listed[:count]


class Configuration(Protocol):
    """A plan without its stages."""

    @property
    def most(self) -> float:
        """Upper bound on its plays' samples a second."""

    @property
    def schedule(self) -> str:
        """The name of its schedule."""

    def split(self) -> tuple[int, ...] | None:
        """The stops of its split; empty if cuts cannot be moved, None if no split fits."""

    def most_of(self, stops: tuple[int, ...]) -> float:
        """Upper bound on samples a second with these stages."""

    def most_of_any(self) -> float:
        """Upper bound on samples a second with any stages."""

    def splits_above(self, rate: float, split: tuple[int, ...]) -> Splits:
        """The splits that may play faster than `rate` samples a second, by these bounds; `split` is one of all."""

    def plan(self, stops: tuple[int, ...]) -> Plan | None:
        """The plan with these stages, not played; None if they do not fit."""

    def alternative(self, reason: str) -> Alternative:
        """Its entry among a plan's alternatives, without a price."""


class Space(Protocol):
    """The possible answers of a planner."""

    @property
    def planner(self) -> str:
        """The planner's name."""

    @property
    def graph(self) -> CutGraph | None:
        """The graph, if the plans' stages end at places of one order; None if all of its cuts count."""

    @property
    def beyond(self) -> float:
        """Upper bound on samples a second of plans outside the configurations; 0 if there is no such plan.

        It is read after all configurations have been taken.
        """

    @property
    def considered(self) -> int:
        """The number of configurations, without placements."""

    def configurations(self) -> Iterator[Configuration]:
        """All of them, the highest bound first."""


def moved_by_a_block(stops: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The splits in which one cut is a block earlier or later; no stage is empty."""
    for place, (before, stop, after) in enumerate(zip((0, *stops), stops, stops[1:], strict=False)):
        for moved in (stop - 1, stop + 1):
            if before < moved < after:
                yield (*stops[:place], moved, *stops[place + 1 :])
