"""From the end: PipeDream's recurrence (2018, section 3.2), split at the first stage instead of the last.

    V(a, p) = min over s, m of max(T(a..s, m), 2 a_s / B, V(s, p - m))                           V(end, 0) = 0

What a stage keeps depends on the stages downstream of it. These are known when it is added, and one pass from the end
gives all numbers of units. Where a stage also depends on the replicas of its neighbours, these are parameters:

    V(a, p, r | q) = min over s, t of max(T(a..s, r), 2 a_s / B, V(s, p - r, t | r))

is the best from state a on p units, r of them its first stage's, after a stage of q replicas (0: none); t are those of
the stage after it. The sum of stages and of bytes sent obeys the same recurrence, with a sum in place of the maximum.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.pipedream.probe import Stages
from pipeplan.planners.pipedream.space import ROUNDING, PartitionSpace

Combine = Callable[[FloatArray, FloatArray], FloatArray]
"""A stage's value and the value of what follows -> the value of both: the maximum of seconds, the sum of ranks."""

StageValues = Callable[[int, int], FloatArray]
"""By a stage's units and those downstream, the value of the stages from each state to each; infinite if none fits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FromEnd:
    """The pipelines from `start` to `stop` on at most `units` units.

    Without neighbours, r, q and t do not matter, and their axes have one entry.
    """

    units: int
    start: int
    stop: int
    has_neighbours: bool = False

    def values(self, stages: StageValues, cuts: FloatArray, combine: Combine) -> list[FloatArray]:
        """V by p, each of the shape (r, q, states), from the values of stages and of cuts."""
        values = [np.where(np.arange(len(cuts)) == self.stop, 0.0, np.inf)[None, None]]
        for total in range(1, self.units + 1):
            rows = []
            for first in range(1, total + 1):
                after = self._after(values, cuts, combine, first, total - first)
                rows.append(self.with_stage(stages(first, total - first), first, total - first, after, combine))
            values.append(np.stack(rows) if self.has_neighbours else np.min(rows, axis=0)[None])
        return values

    def _after(
        self, values: list[FloatArray], cuts: FloatArray, combine: Combine, first: int, later: int
    ) -> FloatArray:
        """By t and state, the cut there and what follows a stage of `first` units, on `later` units."""
        return combine(values[later][:, first if self.has_neighbours else 0], cuts) if later else values[0][0]

    def with_stage(self, stage: FloatArray, first: int, later: int, after: FloatArray, combine: Combine) -> FloatArray:
        """V by q and state, of a first stage of the value `stage`; `after` is the value by t and state that follows."""
        return np.asarray(combine(stage, after[0]).min(axis=1))[None]

    def fits(self, here: int, before: int, first: int, later: int) -> BoolArray:
        """By t and state, whether a stage from `here` to there fits after a stage of `before` replicas."""
        return np.ones((1, 1), dtype=bool)

    def read(
        self, stages: StageValues, cuts: FloatArray, ranks: list[FloatArray], total: int
    ) -> Iterator[tuple[int, int, int]]:
        """The stages of the least rank, from the front: the smallest cut, then the fewest units."""
        here, before, firsts = self.start, 0, range(1, total + 1)
        while here != self.stop:
            choices = []
            for first in firsts:
                after = self._after(ranks, cuts, np.add, first, total - first)
                fits = self.fits(here, before, first, total - first)
                choices.append(np.where(fits, stages(first, total - first)[here] + after, np.inf))
            limit = min(float(through.min()) for through in choices) * (1 + ROUNDING)
            if not np.isfinite(limit):
                raise ValueError(f"there is no pipeline on {total} units")
            stop, first, t = min(
                (int(stop), first, int(t))
                for first, through in zip(firsts, choices, strict=True)
                for t, stop in np.argwhere(through <= limit)
            )
            yield here, stop, first
            here, total, before = stop, total - first, first
            firsts = range(t + 1, t + 2) if self.has_neighbours else range(1, total + 1)


def fewest_sent(
    pipelines: FromEnd,
    space: PartitionSpace,
    states: IntArray,
    within: Callable[[int, int], BoolArray],
    cuts_within: BoolArray,
    total: int,
) -> Stages:
    """The stages on `total` units that the rule for ties prefers, by position among the states.

    The rule: fewer stages; then fewer bytes sent (each boundary both ways, and every stage's exchange of gradients);
    then the smaller first cut, the fewer units on the first stage, the smaller second cut, and so on. `within` says
    which stages are within the bottleneck, by their units and those downstream, `cuts_within` which cuts are.
    """
    between_bytes = space.exchange * (space.weight_bytes[states] - space.weight_bytes[states, None])
    cuts_bytes = 2.0 * space.boundary_bytes[states]
    one_stage = 2.0 * float(cuts_bytes.sum()) + float(between_bytes[0, -1]) + 1.0  # exceeds what all stages send

    def rank(first: int, later: int) -> FloatArray:
        return np.where(within(first, later), one_stage + (first - 1) / first * between_bytes, np.inf)

    cuts = np.where(cuts_within, cuts_bytes, np.inf)
    return tuple(pipelines.read(rank, cuts, pipelines.values(rank, cuts, np.add), total))
