"""First plans: good plans from recurrences, from which the solver starts and which it can only improve.

Where all devices are of one type, a recurrence over the same tables finds the optimum, and the solver proves it. Where
they are of several types, the recurrences only try one type after the other, in every order; the solver mixes them.

- `placed` places stages that are equally wide; `PlacedStages` chooses PipeDream's replicas along a row of devices.
- `balanced` and `least_excess` split the blocks into stages whose places are known, over the tables of their kinds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.planners.exact.kinds import StageKind, StageShape, Tabulated
from pipeplan.planners.exact.places import Placed, Places, Team

MAX_ORDERS = 24
MAX_ROWS = 64
"""Upper bound on the orders of the types, and on the sequences of the stages' types, that are tried."""

_Places = dict[tuple[int, int], FloatArray]
"""Tables by first device and replicas."""


def placed(shape: StageShape, places: Places) -> Iterator[Placed]:
    """The placements of a shape whose stages are equally wide."""
    width = shape.width or 1
    if len(places.counts) == 1:
        for links in places.orientations(shape):
            yield places.oriented(shape, links)
        return

    # All stages of a type together, the types in every order, as many of each as there may be.
    seen: set[tuple[Team, ...]] = set()
    for order in islice(permutations(range(len(places.counts))), MAX_ORDERS):
        most = [range(min(places.counts[kind] // width, shape.depth), -1, -1) for kind in order]
        for stages in product(*most):
            teams = tuple(
                Team(type=kind, replicas=width) for kind, many in zip(order, stages, strict=True) for _ in range(many)
            )
            if sum(stages) == shape.depth and teams not in seen:
                seen.add(teams)
                yield places.in_a_row(teams)
                if len(seen) == MAX_ROWS:
                    return


@dataclass(frozen=True, kw_only=True)
class PlacedStages:
    """PipeDream's devices in a row, types one after the other: stages of any replicas on contiguous devices.

    `order` are the types, `used` counts the devices from the front; with `straight` no stage has replicas.
    """

    tabulated: Tabulated
    places: Places
    order: tuple[int, ...]
    used: int
    straight: bool

    def teams(
        self, shape: StageShape, *, depth: int | None = None, quantity: str = "time_s"
    ) -> tuple[Team, ...] | None:
        """The teams of the partition with the least largest entry, into `depth` stages or any number; None if there is
        none.

        B(d, p, i) is the largest entry of the best d stages of the blocks [i, n) on the devices [p, used). Where the
        number of stages is free, d is left out, and ties prefer the fewest stages.
        """
        tables = self._tables(shape, quantity)
        if depth is not None:
            return self._exactly(tables, depth)
        worst = self._fold(tables, np.maximum, -np.inf)[0, 0]
        if not np.isfinite(worst):
            return None
        ones = {place: np.where(table <= worst, 1.0, np.inf) for place, table in tables.items()}
        fewest = self._fold(ones, np.add, 0.0)

        # Read off the fewest stages: ties prefer fewer replicas, then the first stop.
        types, teams = self._types, []
        first = start = 0
        while first < self.used:
            replicas = 0
            reached = np.full(1, np.inf)
            while reached.min() != fewest[first, start]:
                replicas += 1
                if (first, replicas) in ones:
                    reached = ones[first, replicas][start] + fewest[first + replicas, 1:]
            teams.append(Team(type=types[first], replicas=replicas))
            first, start = first + replicas, int(np.argmin(reached)) + 1
        return tuple(teams)

    def entries(self, depth: int | None) -> float:
        """The number of table entries that `teams` reads: tables of the kinds, then every place (with every depth)."""
        places = self.used * ((1 if self.straight else self.used) + 1) / 2
        return self.tabulated.blocks**2 * places * ((depth or 2) + 1)

    def _exactly(self, tables: _Places, depth: int) -> tuple[Team, ...] | None:
        """The teams of `depth` stages: ties prefer fewer replicas from the front, then the first stop."""
        worst = np.full((depth + 1, self.used + 1, self.tabulated.blocks + 1), np.inf)
        worst[0, self.used, -1] = -np.inf
        for layer in range(1, depth + 1):
            for (first, replicas), table in tables.items():
                here = np.maximum(table, worst[layer - 1, first + replicas, None, 1:]).min(axis=1)
                np.minimum(worst[layer, first, :-1], here, out=worst[layer, first, :-1])
        if not np.isfinite(worst[depth, 0, 0]):
            return None

        types, teams = self._types, []
        first = start = 0
        for layer in range(depth, 0, -1):
            for replicas in range(1, self.used - first + 1):
                if (first, replicas) not in tables:
                    continue
                reached = np.maximum(tables[first, replicas][start], worst[layer - 1, first + replicas, 1:])
                if reached.min() == worst[layer, first, start]:
                    break
            teams.append(Team(type=types[first], replicas=replicas))
            first, start = first + replicas, int(np.argmin(reached)) + 1
        return tuple(teams)

    def _fold(self, tables: _Places, combine: np.ufunc, nothing: float) -> FloatArray:
        """The best of any stages of the blocks [i, n) on the devices [p, used), as [p, i]."""
        best = np.full((self.used + 1, self.tabulated.blocks + 1), np.inf)
        best[self.used, -1] = nothing
        for (first, replicas), table in sorted(tables.items(), reverse=True):
            here = combine(table, best[first + replicas, None, 1:]).min(axis=1)
            np.minimum(best[first, :-1], here, out=best[first, :-1])
        return best

    def _tables(self, shape: StageShape, quantity: str) -> _Places:
        """By first device and replicas, in ascending order.

        Each stage sees its own half of a boundary: its devices and the nearest of the other stage's.
        """
        devices = [int(rank) for kind in self.order for rank in self.places.ranks[kind]][: self.used]
        types = self._types
        of_kind: dict[StageKind, FloatArray] = {}
        tables = {}
        for first, of_type in enumerate(types):
            most = 1 if self.straight else types[first:].count(of_type)
            for replicas in range(1, most + 1):
                stop = first + replicas
                kind = StageKind(
                    stage=0,
                    type=of_type,
                    replicas=replicas,
                    # Only the number in flight matters: it is rounded up to whole stages of these replicas.
                    workers=-(-(self.used - first) // replicas) * replicas,
                    own=self._spanning(devices[first:stop]),
                    before=self._spanning(devices[max(first - 1, 0) : stop]),
                    after=self._spanning(devices[first : stop + 1]),
                )
                if kind not in of_kind:
                    of_kind[kind] = getattr(self.tabulated, quantity)(shape, kind)
                tables[first, replicas] = of_kind[kind]
        return tables

    @property
    def _types(self) -> list[int]:
        return [kind for kind in self.order for _ in self.places.ranks[kind]][: self.used]

    def _spanning(self, devices: Sequence[int]) -> float:
        return self.places.bandwidth(self.places.level(min(devices), max(devices)))


def rows(tabulated: Tabulated, places: Places, *, straight: bool, fewer: bool) -> Iterator[PlacedStages]:
    """PipeDream's rows: the types in every order, on all devices; with `fewer`, also on the first of them."""
    devices = sum(places.counts)
    for order in islice(permutations(range(len(places.counts))), MAX_ORDERS):
        for used in range(1, devices + 1) if fewer else (devices,):
            yield PlacedStages(tabulated=tabulated, places=places, order=order, used=used, straight=straight)


def least_worst(tables: Sequence[FloatArray]) -> float:
    """The largest entry of the split whose largest entry is least; infinite where there is no split. O(stages n^2)."""
    return float(_fold(tables, np.maximum, -np.inf)[-1][-1])


def balanced(tables: Sequence[FloatArray]) -> tuple[int, ...] | None:
    """The stops of the split whose largest entry is least; ties prefer the least sum of squares."""
    worst = least_worst(tables)
    if not np.isfinite(worst):
        return None
    squares = [np.where(table <= worst, np.square(table), np.inf) for table in tables]
    folds = _fold(squares, np.add, 0.0)
    stops = [len(tables[0])]
    for stage in reversed(range(len(tables))):
        before = folds[stage][:-1] + squares[stage][:, stops[-1] - 1]
        stops.append(int(np.argmin(before)))
    return tuple(stops[-2::-1])


def least_excess(tables: Sequence[FloatArray]) -> tuple[int, ...] | None:
    """As `balanced`, of entries that may be negative."""
    finite = [table[np.isfinite(table)] for table in tables]
    if not all(len(entries) for entries in finite):
        return None
    least = min(float(entries.min()) for entries in finite)
    return balanced([table - least for table in tables])


def _fold(tables: Sequence[FloatArray], combine: np.ufunc, nothing: float) -> list[FloatArray]:
    """The best of the stages before s on the blocks [0, i), as [s][i]."""
    best = np.full(len(tables[0]) + 1, np.inf)
    best[0] = nothing
    folds = [best]
    for table in tables:
        best = np.append(np.inf, combine(folds[-1][:-1, None], table).min(axis=0))
        folds.append(best)
    return folds
