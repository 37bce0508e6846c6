"""Split: n blocks into exactly d contiguous stages, where a stage's cost depends on which stage it is.

A recurrence folds the suffixes from the last stage on. The walk from the front takes the first best stop, hence the
lexicographically smallest cuts. Over all starts, that takes O(d (n - d + 1)^2) time.

Few starts are needed. A stage costs at least the work of its blocks, and work adds up. If no stage may cost more than a
limit, then stage s starts no later than s stages within the limit reach from the front, and no earlier than the other
stages reach back from the end. The search for the least largest cost raises the limit until its result is within the
limit: no split outside can then be as good. For the least sum of squares the limit is on the sum, and the work before a
stage is near its even share.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.two_bw.places import Bands, windows

ROUNDING = 1e-9
"""Upper bound on the difference of sums in different orders, and so the tolerance of all bounds."""

TIE = 1e-12
"""Costs of splits, and rates, that differ by no more than this share of them are equal."""

NEAR = 1 / 64
"""The gap between a search's limit and the least that leaves any starts, as a share of it."""

BAND = 64
"""The number of starts of a stage that are folded together."""

CELLS = 2**15
"""The number of places of stages that are computed together: their tables stay in the processor's cache."""

NARROW = 32
"""If the lengths of a stage differ by this much or more, its longest within the limits is looked up."""

HALVINGS = 12
"""Upper bound on the halvings of the gap between a limit that leaves starts and one that leaves none."""

Costs = Callable[[int, slice, slice], FloatArray]
"""(stage, starts, stops) -> the costs of the stage with the blocks [i, j), for i and j of the two ranges; infinite
where there may be no such stage."""

BandCosts = Callable[[Bands], FloatArray]
"""The costs of several stages at once."""

Way = Sequence[tuple[Sequence[float], float]]
"""A mode: pairs of sums over the blocks [0, i), for every i up to n, and a stage's limit on the sum."""

Limits = Callable[[float], Sequence[Sequence[Way]]]
"""Limit on the cost -> each stage's modes within it: a stage outside all of its modes costs more."""

Starts = tuple[slice, ...]
"""Each stage's possible starts, and as the last element the end of the blocks."""


def every_start(blocks: int, depth: int) -> Starts:
    """All starts that leave a block for every stage."""
    spare = blocks - depth + 1
    return (slice(0, 1), *(slice(stage, stage + spare) for stage in range(1, depth)), slice(blocks, blocks + 1))


def starts_within(limits: Limits, limit: float, among: Starts) -> Starts | None:
    """The stages' possible starts if none may cost more than the limit; None if there is no such split."""
    every = limits(limit)
    highest = _highest(every, among)
    if highest is None:
        return None
    lowest = [among[-1].start]
    for ways, may, high in zip(reversed(every), reversed(among[:-1]), reversed(highest[:-1]), strict=True):
        # The first start from which a stage reaches its lowest stop, in the best of its modes.
        first = lowest[-1]
        for way in ways:
            reach = 0
            for sums, most in way:
                reach = max(reach, bisect_left(sums, sums[lowest[-1]] - most))
            first = min(first, reach)
        if first > high:
            return None
        lowest.append(max(first, may.start))
    lowest.reverse()
    return tuple([slice(low, high + 1) for low, high in zip(lowest, highest, strict=True)])


def is_within(limits: Limits, limit: float, among: Starts) -> bool:
    """Whether there is such a split: it is enough to test the one whose stages are all as long as possible."""
    return _highest(limits(limit), among) is not None


def _highest(every: Sequence[Sequence[Way]], among: Starts) -> list[int] | None:
    """The last start of every stage, if all before it are as long as possible; None if one ends too early."""
    start, highest = 0, [0]
    for ways, may in zip(every, among[1:], strict=True):
        # The last stop that the stage reaches, in the best of its modes; no farther than allowed.
        reached, farthest = 0, may.stop
        for way in ways:
            reach = farthest
            for sums, most in way:
                stop = bisect_right(sums, sums[start] + most)
                if stop < reach:
                    reach = stop
            if reach > reached:
                reached = reach
                if reached == farthest:
                    break
        if reached <= may.start:
            return None
        start = reached - 1
        highest.append(start)
    return highest


@dataclass(frozen=True, slots=True)
class Found:
    """The least largest cost of a split, and starts that include those of all splits that reach it.

    `best`: by the start of every stage, the first stop of a split of it and those after it whose largest cost is least.
    """

    worst: float
    starts: Starts
    best: Sequence[IntArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSearch:
    """A search's input: the stages' costs, their limits, their possible starts, and a lower bound on the result.

    `bands` makes the costs among some starts. `about` is no more than the least largest cost: a cost below it may be
    given as any value below it.
    """

    bands: Callable[[Starts, float], BandCosts]
    limits: Limits
    starts: Starts
    about: float

    def least_max(self, ceiling: float = inf) -> Found | None:
        """The least largest cost; None if there is no split, or none at or below the ceiling.

        The search first brings the limit near to the least one that leaves any starts. Among these starts it finds a
        cost that a split reaches. With this cost as the limit, the remaining starts include those of the best splits.
        """
        if not is_within(self.limits, ceiling, self.starts):
            return None

        # Raise the limit in steps that quadruple until it leaves starts; then halve the gap to one that leaves none.
        low, more = self.about, 4 * NEAR
        high = min(self.about * (1 + more), ceiling)
        while high < ceiling and not is_within(self.limits, high, self.starts):
            low, more = high, 4 * more
            high = min(high * (1 + more), ceiling) if high > 0 else ceiling
        for _ in range(HALVINGS):
            if high > low * (1 + NEAR) and isfinite(high):
                middle = (low + high) / 2
                leaves = is_within(self.limits, middle, self.starts)
                low, high = (low, middle) if leaves else (middle, high)

        limit, more = high, NEAR
        while True:
            starts = starts_within(self.limits, limit, self.starts)
            if starts is None:
                return None
            least, best = _fold_bands(self.bands(starts, self.about), starts, np.maximum, self.limits(limit))
            worst = max(least, self.about)
            if worst <= limit:
                return Found(worst, starts, best) if isfinite(worst) else None
            if limit >= ceiling:
                return None
            if isfinite(worst):  # some split reaches it, and so does the best one
                limit = min(worst, ceiling)
            else:
                limit, more = min(limit * (1 + more) if more < 1 else inf, ceiling), 4 * more

    def stops(self, found: Found) -> tuple[int, ...]:
        """The stops of the split found; ties prefer the least sum of squares."""
        costs = self.bands(found.starts, 0.0)

        def squares(at: Bands) -> FloatArray:
            tables = costs(at)
            return np.where(tables <= found.worst * (1 + TIE), np.square(tables), np.inf)

        limits = self.limits(found.worst * (1 + ROUNDING))
        return _followed(found.starts, _fold_bands(squares, found.starts, np.add, limits)[1])

    def any_stops(self, found: Found) -> tuple[int, ...]:
        """The stops of any split found: faster than `stops` where ties do not matter."""
        return _followed(found.starts, found.best)


def least_sum(costs: Costs, starts: Starts) -> float:
    """The least sum of a split; infinite if there is no split."""
    return _fold(costs, starts, np.add)[0].item(0)


def min_sum(costs: Costs, starts: Starts) -> tuple[int, ...]:
    """The stops of the split of the least sum, the first best from the front. There must be one."""
    suffixes, stops = _fold(costs, starts, np.add), [0]
    for stage in range(len(starts) - 1):
        here = slice(stops[-1], stops[-1] + 1)
        best = np.argmin(costs(stage, here, starts[stage + 1])[0] + suffixes[stage + 1])
        stops.append(starts[stage + 1].start + int(best))
    return tuple(stops[1:])


def even_min_sum(costs: Costs, starts: Starts, *, held: Costs, squares: Costs) -> tuple[int, ...]:
    """The stops of the split of the least sum whose largest `held` is least, then whose sum of `squares` is.

    There must be a split. A stage is in a split of the least sum if its cost, with the least sums before and after it,
    comes to that sum. A sequence of such stages is always a split of the least sum.
    """
    # The least sums of the stages before each one, and of all from it on, by its start.
    before, after = [np.zeros(1)], _fold(costs, starts, np.add)
    for stage in range(len(starts) - 1):
        table = costs(stage, starts[stage], starts[stage + 1])
        before.append(np.minimum.reduce(table + before[-1][:, None], axis=0))
    most = after[0].item(0) * (1 + TIE)

    def held_at_best(stage: int, begins: slice, stops: slice) -> FloatArray:
        first, last = starts[stage].start, starts[stage + 1].start
        sums = before[stage][begins.start - first : begins.stop - first][:, None] + costs(stage, begins, stops)
        sums += after[stage + 1][stops.start - last : stops.stop - last]
        return np.where(sums <= most, held(stage, begins, stops), np.inf)

    least = _fold(held_at_best, starts, np.maximum)[0].item(0)

    def squares_at_best(stage: int, begins: slice, stops: slice) -> FloatArray:
        return np.where(held_at_best(stage, begins, stops) <= least, squares(stage, begins, stops), np.inf)

    return min_sum(squares_at_best, starts)


def least_squares(costs: Callable[[Starts], Costs], work: Sequence[float], starts: Starts) -> tuple[int, ...] | None:
    """The stops of the split whose stages' work has the least sum of squares; None if there is no split.

    `costs` makes the squares among some starts, infinite where a stage may not be. With x before stage s, the squares
    come to at least x^2 / s + (T - x)^2 / (d - s): for a sum of at most T^2 / d + u, x is within
    sqrt(u s (d - s) / d) of s T / d.
    """
    depth, total = len(starts) - 1, work[-1]
    excess = (total / depth) ** 2 / depth
    while True:
        # The starts where the work before is as near to its even share as the excess allows.
        near = []
        for stage, may in enumerate(starts):
            even = stage * total / depth
            reach = sqrt(excess * stage * (depth - stage) / depth) + ROUNDING * total
            low = max(bisect_left(work, even - reach), may.start)
            high = min(bisect_right(work, even + reach), may.stop)
            near.append(may if stage in (0, depth) else slice(low, high))

        if all(may.start < may.stop for may in near):
            among = tuple(near)
            sum_of_squares = least_sum(costs(among), among)
            if sum_of_squares <= total**2 / depth + excess or among == starts:
                return min_sum(costs(among), among) if isfinite(sum_of_squares) else None
        excess *= 8


def _fold(costs: Costs, starts: Starts, combine: np.ufunc) -> list[FloatArray]:
    """The best cost of stage s and those after it by the start of stage s, for every s; 0 after the last stage."""
    suffixes = [np.zeros(1)]
    for stage in reversed(range(len(starts) - 1)):
        begins, best = starts[stage], []
        for first in range(begins.start, begins.stop, BAND):
            some = slice(first, min(first + BAND, begins.stop))
            table = combine(costs(stage, some, starts[stage + 1]), suffixes[-1])
            best.append(np.minimum.reduce(table, axis=1, initial=inf))
        suffixes.append(np.concatenate(best))
    return suffixes[::-1]


def _fold_bands(
    costs: BandCosts, starts: Starts, combine: np.ufunc, limits: Sequence[Sequence[Way]]
) -> tuple[float, list[IntArray]]:
    """The best cost, and by start of every stage its first best stop; stages beyond the limits are left out."""
    suffix, choices = np.zeros(1), list[IntArray]()
    parts, chosen = list[FloatArray](), list[IntArray]()
    for bands in _bands(starts, limits):
        tables = costs(bands)
        for place in reversed(range(len(tables))):
            stage = bands.stages.start + place
            begins, ends = starts[stage], starts[stage + 1]
            first, shortest = int(bands.lows[place]), int(bands.shortest[place])
            rows = min(begins.stop - first, bands.rows)

            # The cost of the later stages, by start and length: infinite outside the starts of the next stage.
            after = np.full(bands.rows + bands.reach - 1, inf)
            shift = first + shortest - ends.start
            low, high = max(shift, 0), min(shift + len(after), ends.stop - ends.start)
            if low < high:
                after[low - shift : high - shift] = suffix[low:high]
            table = combine(tables[place, :rows], windows(after, bands.reach)[:rows])
            best = table.argmin(axis=1)
            own = np.arange(rows)
            parts.append(table[own, best])
            chosen.append(best + own + (first + shortest))
            if first + rows == begins.stop:
                suffix, choice = np.concatenate(parts), np.concatenate(chosen)
                choices.append(choice)
                parts.clear()
                chosen.clear()
    return suffix.item(0), choices[::-1]


def _followed(starts: Starts, best: Sequence[IntArray]) -> tuple[int, ...]:
    """The stops that the choices of stage after stage lead to."""
    stops, start = [], 0
    for begins, choice in zip(starts, best, strict=False):
        start = int(choice[start - begins.start])
        stops.append(start)
    return tuple(stops)


def _bands(starts: Starts, limits: Sequence[Sequence[Way]]) -> Iterator[Bands]:
    """All places within the limits, from the last stage on: several stages together, or some starts of one."""
    blocks, arrays = starts[-1].start, dict[int, FloatArray]()
    together = list[tuple[int, int, int, int]]()
    rows = reach = 0

    def bands(several: list[tuple[int, int, int, int]], rows: int, reach: int) -> Bands:
        several = several[::-1]
        _, lows, shortest, _ = zip(*several, strict=True)
        stages = slice(several[0][0], several[-1][0] + 1)
        return Bands(stages, np.asarray(lows), np.asarray(shortest), rows, reach, blocks)

    for stage in reversed(range(len(starts) - 1)):
        begins, ends = starts[stage], starts[stage + 1]
        shortest = max(ends.start - begins.stop + 1, 1)
        longest = ends.stop - 1 - begins.start
        if longest - shortest >= NARROW:
            longest = min(longest, _longest(limits[stage], begins, arrays))
        own_rows, own_reach = begins.stop - begins.start, max(longest - shortest + 1, 1)
        most_rows, most_reach = max(rows, own_rows), max(reach, own_reach)
        if together and (len(together) + 1) * most_rows * most_reach > CELLS:
            yield bands(together, rows, reach)
            together, most_rows, most_reach = [], own_rows, own_reach
        if own_rows * own_reach <= CELLS:
            together.append((stage, begins.start, shortest, longest))
            rows, reach = most_rows, most_reach
            continue
        step = max(CELLS // own_reach, 1)
        for first in range(begins.start, begins.stop, step):
            yield bands([(stage, first, shortest, longest)], min(step, begins.stop - first), own_reach)
        rows = reach = 0
    if together:
        yield bands(together, rows, reach)


def _longest(ways: Sequence[Way], begins: slice, arrays: dict[int, FloatArray]) -> int:
    """Upper bound on a stage's blocks from any of these starts, in the best of its modes."""
    longest = 0
    for way in ways:
        reached = []
        for sums, most in way:
            if id(sums) not in arrays:
                arrays[id(sums)] = np.asarray(sums)
            values = arrays[id(sums)]
            reached.append(values.searchsorted(values[begins] + most, side="right"))
        lengths = np.minimum.reduce(reached) - np.arange(begins.start, begins.stop)
        longest = max(longest, int(lengths.max()) - 1)
    return longest
