"""Message recurrence: PipeDream's recurrence (2018, section 3.2) with memory, messages included, on one level.

A stage's messages in transit depend on the replicas of the stages before and after it (`fitting.Neighbours`). So the
recurrence of `memory_recurrence` has both as parameters:

    V(a, p, r | q) = min over b, t of max(T(a..b, r), 2 a_b / B, V(b, p - r, t | r))        V(end, 0) = 0

is the time of the best pipeline from state a to the end on p devices, r of them its first stage's, after a stage of q
replicas (0: none). T is infinite where the stage does not fit between stages of q and t. Most q, and most t, lead to
the same counts of messages; these are solved together. O(n^2 M^4), for few devices.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.memory import edges_to
from pipeplan.planners.pipedream.memory_recurrence import CALL_ENTRIES, Recurrence, downstream_each
from pipeplan.planners.pipedream.probe import Stages
from pipeplan.planners.pipedream.space import ROUNDING
from pipeplan.programs.in_transit import InTransit

Values = dict[tuple[int, int, int], FloatArray]
"""By p, r and q, the value from each state."""

Stage = Callable[[InTransit], FloatArray]
"""The value of stages on certain devices with these messages in transit, by state at both ends."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageRecurrence:
    """The pipelines of a space of one level. The tables may be `of_bytes`; then nothing is too large."""

    tables: Recurrence

    def work(self) -> float:
        """An estimate of the entries that are compared."""
        return max(len(self.tables.space) ** 2, CALL_ENTRIES) * self._units**4 / 48.0

    def optimum(self, *, fewer: bool) -> tuple[float, Stages] | None:
        """The least bottleneck in seconds (or bytes) and its stages, on all devices, or on `fewer`. None if none fit.

        Ties go as in `ties`: to fewer devices, fewer stages, fewer bytes sent, and smaller cuts.
        """
        boundaries_s = self.tables.boundaries_s(0)
        every = range(1, self._units + 1) if fewer else (self._units,)
        values = self._values(self._fitting, boundaries_s, np.maximum)
        whole = {total: self._least(values, total) for total in every}
        cost_s = min(whole.values())
        if not np.isfinite(cost_s):
            return None
        limit_s = cost_s * (1 + 2 * ROUNDING)
        total = min(total for total in every if whole[total] <= limit_s)

        space = self.tables.space
        between_bytes = space.exchange * (space.weight_bytes - space.weight_bytes[:, None])
        cuts_bytes = 2.0 * space.boundary_bytes
        one_stage = 2.0 * float(cuts_bytes.sum()) + float(between_bytes[0, -1]) + 1.0  # exceeds what all stages send

        def within(first: int, later: int) -> Stage:
            fitting, rank = self._fitting(first, later), one_stage + (first - 1) / first * between_bytes
            return cache(lambda messages: np.where(fitting(messages) <= limit_s, rank, np.inf))

        cuts = np.where(boundaries_s <= limit_s, cuts_bytes, np.inf)
        ranks = self._values(within, cuts, np.add)
        return cost_s, tuple(self._read(within, cuts, ranks, total))

    @property
    def _units(self) -> int:
        return self.tables.space.levels[0].units

    def _least(self, values: Values, total: int) -> float:
        return min(float(values[total, first, 0][0]) for first in range(1, total + 1))

    def _values(self, stages: Callable[[int, int], Stage], boundary: FloatArray, combine: np.ufunc) -> Values:
        """V from the values of `stages`, by their devices and those downstream, and of boundaries."""
        values: Values = {}
        for total in range(1, self._units + 1):
            for first in range(1, total + 1):
                later, stage = total - first, stages(first, total - first)
                # by a worker's edges to the next stage: one number of its replicas stands for all with equal edges
                following: dict[int, tuple[int, FloatArray]] = {} if later else {0: (0, self._at_end)}
                for t in range(1, later + 1):
                    after, edges = combine(values[later, t, first], boundary), edges_to(first, t)
                    stands, before = following.get(edges, (t, after))
                    following[edges] = stands, np.minimum(before, after)
                for alike in self._alike_before(total, first):
                    least: dict[InTransit, FloatArray] = {}  # of what follows
                    for t, after in following.values():
                        messages = self.tables.memory.messages((alike[0], first, t, later))
                        least[messages] = np.minimum(least.get(messages, after), after)
                    best = np.minimum.reduce([combine(stage(each), least[each]).min(axis=1) for each in least])
                    values.update({(total, first, q): best for q in alike})
        return values

    def _alike_before(self, total: int, first: int) -> list[list[int]]:
        """The possible replicas of the stage before, in groups of equal counts of messages."""
        memory, found = self.tables.memory, defaultdict(list)
        for replicas in range(self._units - total + 1):
            found[memory.messages((replicas, first, 0, total - first)).inputs].append(replicas)
        return list(found.values())

    def _fitting(self, first: int, later: int) -> Stage:
        """T, in seconds or bytes."""
        tables, memory = self.tables, self.tables.memory
        stage_s, every = tables.stage_s(0, first, later, 0), np.arange(len(tables.space))
        held_bytes = memory.held_bytes(every, every, 1.0 + downstream_each(later, first))
        there = np.isfinite(stage_s)

        def stage(messages: InTransit) -> FloatArray:
            all_bytes = held_bytes + memory.message_bytes(every, every, messages)
            if tables.of_bytes:
                return np.where(there, all_bytes, np.inf)
            return np.where(all_bytes <= memory.law.limit_bytes, stage_s, np.inf)

        return cache(stage)

    @cached_property
    def _at_end(self) -> FloatArray:
        """V of no devices: 0 at the end."""
        return np.where(np.arange(len(self.tables.space)) == self.tables.space.last, 0.0, np.inf)

    def _read(
        self, stages: Callable[[int, int], Stage], cuts: FloatArray, ranks: Values, total: int
    ) -> Iterator[tuple[int, int, int]]:
        """The stages of the least rank, from the front."""
        last, here, q, wanted = self.tables.space.last, 0, 0, self._least(ranks, total)
        first = min(first for first in range(1, total + 1) if ranks[total, first, 0][0] <= wanted * (1 + ROUNDING))
        while here < last:
            later, choices = total - first, []
            stage = stages(first, later)
            for t in range(1, later + 1) if later else (0,):
                after = ranks[later, t, first] + cuts if later else self._at_end
                through = stage(self.tables.memory.messages((q, first, t, later)))[here] + after
                choices.append((float(through.min()), int(through.argmin()), t))
            least = min(choices)[0] * (1 + ROUNDING)
            stop, t = min((b, t) for rank, b, t in choices if rank <= least)
            yield here, stop, first
            here, total, q, first = stop, later, first, t
