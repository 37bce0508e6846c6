"""Straight: every stage on one device, all of them used; PipeDream's pipeline without replication.

With the stages counted from the end, a stage that has j - 1 behind it keeps j minibatches in flight, and the cut
before it crosses the level whose units j fills: everything is known, and the plain recurrence gives the optimum,

    V(a, j) = min over b of max(T(a..b), 2 a_b / B, V(b, j - 1)),

in O(n^2 M), less what lies beyond a bound on the work of a stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner_service.core.cost.compute import FloatArray
from planner_service.core.planner.partition_memory import Memory
from planner_service.core.planner.partition_probe import Stages
from planner_service.core.planner.partition_space import ROUNDING, Space


@dataclass(frozen=True, kw_only=True, eq=False)
class Straight:
    """The pipelines of one device a stage; `memory` leaves out what does not fit, `of_bytes` minimises it instead."""

    space: Space
    memory: Memory | None = None
    of_bytes: bool = False

    def optimum(self, stages: int) -> tuple[float, Stages] | None:
        """The least bottleneck (or bytes) of exactly so many stages and the stages; None if there are none.

        Ties: fewer bytes sent, then the smaller first cut, and so on.
        """
        if stages > self.space.last:
            return None
        bound = max(float(self.space.compute_s[-1]) / stages, 0.0) if not self.of_bytes else np.inf
        while True:
            bound *= 2
            best = self._values(stages, bound)[-1][0]
            if best <= bound or bound > self.space.compute_s[-1] * 2:
                break
        if not np.isfinite(best):
            return None
        return float(best), tuple(self._preferred(stages, float(best)))

    def _windows(self, bound: float) -> Iterator[tuple[int, slice]]:
        """By state, from the last: the states that a stage within the bound may end at."""
        ends = np.searchsorted(self.space.compute_s, (self.space.compute_s + bound) * (1 + ROUNDING), side="right")
        for here in reversed(range(self.space.last)):
            yield here, slice(here + 1, int(ends[here]))

    def _values(self, stages: int, bound: float) -> list[FloatArray]:
        """V by j and first state."""
        tables = [np.full(len(self.space), np.inf)]
        tables[0][-1] = 0.0
        windows = list(self._windows(bound))
        for j in range(1, stages + 1):
            rest = np.maximum(tables[-1], self._cut_s(j - 1))
            best = np.full(len(self.space), np.inf)
            for here, window in windows:
                best[here] = np.maximum(self._stage(here, window, j), rest[window]).min(initial=np.inf)
            tables.append(best)
        return tables

    def _stage(self, here: int, window: slice, held: int) -> FloatArray:
        """What a stage takes, from here to each state of the window; infinite where none is, or fits."""
        space = self.space
        cost = space.compute_s[window] - space.compute_s[here]
        if self.memory is not None:
            columns = np.arange(window.start, window.stop)
            held_bytes = self.memory.held_bytes(np.array([here]), columns, held)[0]
            fits = held_bytes <= self.memory.law.limit_bytes
            cost = held_bytes if self.of_bytes else np.where(fits, cost, np.inf)
        return cost if space.before is None else np.where(space.before[here, window], cost, np.inf)

    def _cut_s(self, behind: int) -> FloatArray:
        """What a cut takes with so many stages behind it, at each state."""
        if behind == 0 or self.of_bytes:
            return np.zeros(len(self.space))
        level = max(k for k in range(len(self.space.levels)) if behind % self.space.devices_inside(k) == 0)
        return np.asarray(2.0 * self.space.boundary_bytes / self.space.levels[level].bandwidth_bytes_per_s)

    def _preferred(self, stages: int, cost: float) -> Iterator[tuple[int, int, int]]:
        limit = cost * (1 + 2 * ROUNDING)
        windows = dict(self._windows(np.inf if self.of_bytes else limit))
        tables = [np.full(len(self.space), np.inf)]
        tables[0][-1] = 0.0
        for j in range(1, stages + 1):
            best = np.full(len(self.space), np.inf)
            for here, window in windows.items():
                best[here] = self._sent(here, window, j, limit, tables[-1]).min(initial=np.inf)
            tables.append(best)
        here = 0
        for j in reversed(range(1, stages + 1)):
            window = windows[here]
            sent = self._sent(here, window, j, limit, tables[j - 1])
            stop = window.start + int(np.flatnonzero(sent <= tables[j][here] * (1 + ROUNDING))[0])
            yield here, stop, 1
            here = stop

    def _sent(self, here: int, window: slice, j: int, limit: float, table: FloatArray) -> FloatArray:
        within = (self._stage(here, window, j) <= limit) & (self._cut_s(j - 1)[window] <= limit)
        return np.where(within, table[window] + 2 * self.space.boundary_bytes[window], np.inf)
