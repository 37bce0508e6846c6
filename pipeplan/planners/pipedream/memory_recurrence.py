"""Memory recurrence: PipeDream's recurrence (2018, section 3.2; SOSP 2019, section 3.1) from the end, with memory.

It is the exact partition where memory decides and the closed form of `fitting` is not enough. Where we differ from the
papers (`space` has their formulas and the numbers of the steps): the papers take the last stage off and never look at
memory. How many minibatches a stage has in flight depends on the devices behind it. So we take the first stage off, and
what is behind it is known:

    step 2   T^k(a..s, m)     = 1/m max(V^{k-1}(a..s, all units | ((p - m) U + d) / m), W_k(m))
    step 3   V^k(a..b, p | d) = T^k(a..b, p)                                                            one stage
    step 4   V^k(a..b, p | d) = min over s, m of max(T^k(a..s, m), 2 a_s / B_k, V^k(s..b, p - m | d))   several

V is the smaller of steps 3 and 4. p units are left for a..b, d devices are behind them for each replica of all that
they are part of, and a unit of level k has U devices. A stage of r devices has 1 + ceil(devices behind / r) minibatches
in flight (2018, section 3.3); a stage that does not fit its device takes forever. As ceil(d / r) = ceil(ceil(d) / r), d
is rounded up wherever it is handed on, and there are no more tables than devices. O(n^2 M^2) on one level; every level
around another adds a factor n and the numbers d.
"""

from dataclasses import dataclass, field

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.planners.pipedream.fitting import Memory
from pipeplan.planners.pipedream.probe import Stages
from pipeplan.planners.pipedream.space import ROUNDING, PartitionSpace

CALL_ENTRIES = 10_000
"""Entries that are compared in the time that the table of one stage takes at least, however small it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """The tables V^k, each made when it is needed. `of_bytes`: what a device holds takes the place of time."""

    space: PartitionSpace
    memory: Memory
    of_bytes: bool = False
    _values: dict[tuple[int, int], FloatArray] = field(default_factory=dict)

    def work(self) -> float:
        """Entries that the outermost level compares, and inside as many for each number of devices behind."""
        states, (*inside, outermost) = len(self.space), self.space.levels
        work = states**2 * outermost.units**2 / 4.0 + CALL_ENTRIES * outermost.units**2
        tables, around = 1.0, outermost.units
        for level in reversed(range(len(inside))):
            tables = min(tables * around**2 / 2, float(self.space.devices_inside(len(self.space.levels))))
            around = inside[level].units
            work += (states**3 / 6.0 + CALL_ENTRIES) * around**2 * tables
        return work

    def stage_s(self, level: int, units: int, behind: int, beyond: int) -> FloatArray:
        """T^k of all stages on so many units, with units behind and devices beyond; infinite where none is or fits."""
        space = self.space
        if level > 0:
            after = behind_each(behind * space.devices_inside(level) + beyond, units)
            inside = np.asarray(self.values(level - 1, after)[-1])
        else:
            # V^0: the compute of the stages that fit a device, or the bytes of all stages
            every = np.arange(len(space))
            stages = np.triu(np.ones((len(space),) * 2, dtype=bool), k=1) if space.before is None else space.before
            held_bytes = self.memory.held_bytes(every, every, 1.0 + behind_each(behind + beyond, units))
            if self.of_bytes:
                return np.where(stages, held_bytes, np.inf)
            fits = stages & (held_bytes <= self.memory.law.limit_bytes)
            inside = np.where(fits, space.compute_s - space.compute_s[:, None], np.inf)
        if self.of_bytes:
            return inside

        # steps 1 and 2
        weight_bytes = space.weight_bytes - space.weight_bytes[:, None]
        return np.asarray(np.maximum(inside, space.exchange_s(level, weight_bytes, units)) / units)

    def values(self, level: int, beyond: int) -> FloatArray:
        """V^k by units less one, first and last state."""
        key = (level, beyond)
        if key in self._values:
            return self._values[key]
        tables: list[FloatArray] = []
        for units in range(1, self.space.levels[level].units + 1):
            # step 3: one stage, nothing of this level behind it
            best = self.stage_s(level, units, 0, beyond)
            # step 4: a first stage up to the cut, the boundary, and the rest
            for first in range(1, units):
                stage_s, rest = self.stage_s(level, first, units - first, beyond), tables[units - first - 1]
                joined = np.full_like(rest, np.inf)
                for cut, boundary_s in enumerate(self.boundaries_s(level).tolist()):
                    later = np.maximum(rest[cut], boundary_s)
                    np.minimum(joined, np.maximum(stage_s[:, cut, None], later), out=joined)
                best = np.minimum(best, joined)
            tables.append(best)
        self._values[key] = np.stack(tables)
        return self._values[key]

    def boundaries_s(self, level: int) -> FloatArray:
        """2 a / B of every state; 0 if bytes take the place of time."""
        if self.of_bytes:
            return np.zeros(len(self.space))
        return np.asarray(2.0 * self.space.boundary_bytes / self.space.levels[level].bandwidth_bytes_per_s)


def behind_each(devices: int, replicas: int) -> int:
    """Devices behind for each replica, rounded up."""
    return -(-devices // replicas)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryProblem:
    """From one state to another on one level, with devices beyond: the entries that one answer needs."""

    tables: Recurrence
    level: int
    start: int
    stop: int
    beyond: int

    def optimum_s(self, units: int) -> FloatArray:
        """V by units (from 0) and first state, to the stop."""
        boundaries_s = self.tables.boundaries_s(self.level)
        best = np.full((units + 1, len(self.tables.space)), np.inf)
        for total in range(1, units + 1):
            for first in range(1, total + 1):
                stage_s = self._stage_s(first, total - first)
                # step 3 if the first stage takes all units, else step 4
                if first == total:
                    choice = stage_s[:, self.stop]
                else:
                    choice = np.maximum(stage_s, np.maximum(best[total - first], boundaries_s)).min(axis=1)
                best[total] = np.minimum(best[total], choice)
        return best

    def _stage_s(self, units: int, behind: int) -> FloatArray:
        return self.tables.stage_s(self.level, units, behind, self.beyond)

    def preferred(self, units: int, cost_s: float) -> Stages:
        """Fewer stages, then fewer bytes, smaller cuts and fewer units on the earlier stages, within the cost."""
        limit_s = cost_s * (1 + 2 * ROUNDING)

        # the fewest stages, and among those the fewest bytes, by units and first state
        shape = (units + 1, len(self.tables.space))
        count, sent = np.full(shape, np.inf), np.full(shape, np.inf)
        count[0, self.stop] = sent[0, self.stop] = 0.0
        for total in range(1, units + 1):
            for first in range(1, total + 1):
                stages, moved = self._choices((count, sent), first, total - first, limit_s)
                fewest = stages.min(axis=1)
                least = np.where(stages == fewest[:, None], moved, np.inf).min(axis=1)
                lesser = (fewest < count[total]) | ((fewest == count[total]) & (least < sent[total]))
                count[total] = np.where(lesser, fewest, count[total])
                sent[total] = np.where(lesser, least, sent[total])

        # read off from the front: the smallest cut, then the fewest units
        taken, here, left = [], self.start, units
        while left > 0:
            choices = []
            for first in range(1, left + 1):
                stages, moved = self._choices((count, sent), first, left - first, limit_s)
                best = (stages[here] == count[left, here]) & (moved[here] <= sent[left, here] * (1 + ROUNDING))
                choices += [(int(stop), first) for stop in np.flatnonzero(best)]
            stop, first = min(choices)
            taken.append((here, stop, first))
            here, left = stop, left - first
        return tuple(taken)

    def _choices(
        self, ranks: tuple[FloatArray, FloatArray], units: int, behind: int, limit_s: float
    ) -> tuple[FloatArray, FloatArray]:
        """Stages and bytes if a stage of so many units comes first."""
        space, (count, sent) = self.tables.space, ranks
        at_stop = np.arange(len(space)) == self.stop
        boundary = np.where(at_stop, 0.0, self.tables.boundaries_s(self.level))
        within = (self._stage_s(units, behind) <= limit_s) & (boundary <= limit_s)
        weight_bytes = space.weight_bytes - space.weight_bytes[:, None]
        moved = space.exchange * (units - 1) / units * weight_bytes + np.where(at_stop, 0.0, 2 * space.boundary_bytes)
        return np.where(within, 1 + count[behind], np.inf), np.where(within, moved + sent[behind], np.inf)
