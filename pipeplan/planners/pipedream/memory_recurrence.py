"""Memory recurrence: PipeDream's recurrence (2018, section 3.2; SOSP 2019, section 3.1) with a limit on memory.

It finds the exact partition where memory decides and the closed form of `fitting` is not enough. The papers split off
the last stage and do not consider memory. Here, memory depends on the minibatches in flight, and these depend on the
devices downstream of a stage. So the first stage is split off: when it is added, the devices downstream of it are
known. The steps have the numbers of `space`.

V^k(a..b, p | d), in seconds a minibatch, is the time of the best pipeline from state a to state b on p units of level k
of U devices each. The units belong to one replica of an outer stage; d is the number of devices downstream of that
outer stage, divided by its replicas. On the outermost level d is 0.

A stage of r devices has 1 + ceil(devices downstream / r) minibatches in flight (2018, section 3.3). A stage that does
not fit its device takes infinitely long. With n states and M units, one level takes O(n^2 M^2). Each further level
multiplies this by n and by the number of different d. `MemoryProblem` leaves out most states.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.pipedream.fitting import Memory, fewest
from pipeplan.planners.pipedream.probe import Stages
from pipeplan.planners.pipedream.space import ROUNDING, PartitionSpace

CALL_ENTRIES = 10_000
"""Entries compared in the time that numpy needs for the smallest table of stages."""

SLACK = 1e-9
"""Rounding of sums of compute: how far two orders of addition may differ, as a share of all compute or of the limit."""

EVERY = slice(None)

_AT_ONCE = 2**15
"""Entries that are compared at once, to stay in a processor's cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """The tables V^k, each made when it is first needed.

    With `of_bytes`, a device's bytes take the place of seconds: V is then the bytes of the fullest device.
    """

    space: PartitionSpace
    memory: Memory
    of_bytes: bool = False
    _values: dict[tuple[int, int], FloatArray] = field(default_factory=dict)
    _reach: dict[int, IntArray] = field(default_factory=dict)

    def work(self) -> float:
        """An estimate of the entries that all tables compare: those of an inner level once for each number d."""
        states, (*inside, outermost) = len(self.space), self.space.levels
        work = states**2 * outermost.units**2 / 4.0 + CALL_ENTRIES * outermost.units**2
        tables, around = 1.0, outermost.units
        for level in reversed(range(len(inside))):
            tables = min(tables * around**2 / 2, float(self.space.devices_inside(len(self.space.levels))))
            around = inside[level].units
            work += (states**3 / 6.0 + CALL_ENTRIES) * around**2 * tables
        return work

    def stage_s(
        self, level: int, units: int, downstream: int, beyond: int, rows: slice = EVERY, columns: slice = EVERY
    ) -> FloatArray:
        """T^k in seconds of the stages from the states `rows` to the states `columns`, on `units` units.

        `downstream` counts units of this level downstream of the stage; `beyond` is d, in devices. The shape is (rows,
        columns). An entry is infinite where there is no stage, or the stage does not fit.
        """
        space = self.space
        if level > 0:
            after = downstream_each(downstream * space.devices_inside(level) + beyond, units)
            inside = np.asarray(self.values(level - 1, after)[-1][rows, columns])
        else:
            # V^0: the compute of the stages that fit a device, or the bytes of all stages
            held = 1.0 + downstream_each(downstream + beyond, units)
            if self.of_bytes:
                every = np.arange(len(space))
                held_bytes = self.memory.held_bytes(every[rows], every[columns], held)
                return np.where(self._stages[rows, columns], held_bytes, np.inf)
            compute_s = space.compute_s[columns] - space.compute_s[rows, None]
            inside = np.where(self._most_in_flight[rows, columns] >= held, compute_s, np.inf)
        if self.of_bytes:
            return inside

        # steps 1 and 2: T^k(a..s, m) = 1/m max(V^{k-1}(a..s, all units | ((p - m) U + d) / m), W_k(m))
        weight_bytes = space.weight_bytes[columns] - space.weight_bytes[rows, None]
        return np.asarray(np.maximum(inside, space.exchange_s(level, weight_bytes, units)) / units)

    @cached_property
    def _stages(self) -> BoolArray:
        """Whether there is a stage from one state to another; of the shape (states, states)."""
        states = len(self.space)
        return np.triu(np.ones((states, states), dtype=bool), k=1) if self.space.before is None else self.space.before

    @cached_property
    def _most_in_flight(self) -> FloatArray:
        """Each stage's capacity in minibatches in flight, exact to the byte; 0 where there is no stage."""
        every, limit = np.arange(len(self.space)), self.memory.law.limit_bytes
        most = self.memory.most_in_flight(every, every)
        with np.errstate(invalid="ignore"):  # minibatches without bytes: infinity times 0
            most -= self.memory.held_bytes(every, every, most) > limit
            most += self.memory.held_bytes(every, every, most + 1) <= limit
        return np.where(self._stages, most, 0.0)

    @cached_property
    def fewest(self) -> FloatArray:
        """By state, the fewest devices that hold all stages from there to the end."""
        return fewest(self._most_in_flight, self.space)

    def reach(self, held: int) -> IntArray:
        """By state, the last state that a stage from there or from an earlier state reaches, with `held` in flight."""
        if held not in self._reach:
            fits = self._most_in_flight >= held
            last = np.where(fits.any(axis=1), len(self.space) - 1 - np.argmax(fits[:, ::-1], axis=1), 0)
            self._reach[held] = np.maximum.accumulate(last)
        return self._reach[held]

    def values(self, level: int, beyond: int) -> FloatArray:
        """V^k in seconds, for d = `beyond`: of the shape (units, states, states), the first entry for one unit."""
        key = (level, beyond)
        if key in self._values:
            return self._values[key]
        tables: list[FloatArray] = []
        for units in range(1, self.space.levels[level].units + 1):
            # step 3, one stage: V^k(a..b, p | d) = T^k(a..b, p), nothing of this level downstream
            best = self.stage_s(level, units, 0, beyond)
            # step 4, several: V^k(a..b, p | d) = min over s, m of max(T^k(a..s, m), 2 a_s / B_k, V^k(s..b, p - m | d))
            for first in range(1, units):
                stage_s = self.stage_s(level, first, units - first, beyond)
                later = np.maximum(tables[units - first - 1], self.boundaries_s(level)[:, None])
                best = np.minimum(best, _joined(stage_s, later))
            tables.append(best)
        self._values[key] = np.stack(tables)
        return self._values[key]

    def boundaries_s(self, level: int) -> FloatArray:
        """2 a / B in seconds by state; 0 if bytes take the place of seconds."""
        if self.of_bytes:
            return np.zeros(len(self.space))
        return np.asarray(2.0 * self.space.boundary_bytes / self.space.levels[level].bandwidth_bytes_per_s)


def _joined(stage_s: FloatArray, later: FloatArray) -> FloatArray:
    """By states a and b: min over s of max(stage_s[a, s], later[s, b]). All arrays have the shape (states, states).

    A stage ends later than it begins, so entries of s < a are left out. Rows are made in groups that fit in a
    processor's cache.
    """
    joined, rows = np.full_like(later, np.inf), max(_AT_ONCE // later.size, 1)
    for row in range(0, len(later), rows):
        some = stage_s[row : row + rows, row:, None]
        joined[row : row + rows, row:] = np.maximum(some, later[row:, row:]).min(axis=1)
    return joined


def downstream_each(devices: int, replicas: int) -> int:
    """Devices downstream divided by replicas, rounded up.

    Rounding d for an inner level loses nothing, because ceil(d / r) = ceil(ceil(d) / r), and leaves at most one table
    for each number of devices.
    """
    return -(-devices // replicas)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryProblem:
    """The pipelines from `start` to `stop` on one level, with d = `beyond`; only entries that matter are computed."""

    tables: Recurrence
    level: int
    start: int
    stop: int
    beyond: int

    def optimum_s(self, units: int, limit_s: float = np.inf) -> FloatArray:
        """V from each state to the stop, in seconds: of the shape (units + 1, states), the first row for no unit.

        Values within the limit are exact. A value above it may be too high.
        """
        boundaries_s = self.tables.boundaries_s(self.level)
        best = np.full((units + 1, len(self.tables.space)), np.inf)
        near = self._near(units, limit_s)
        for total, rows in enumerate(near[1:], start=1):
            for first in range(1, total + 1):
                # step 3 if the first stage takes all units, else step 4
                columns = near[total - first]
                choice = self._stage_s(first, total - first, rows, columns)
                if first < total:
                    later = np.maximum(best[total - first, columns], boundaries_s[columns])
                    choice = np.maximum(choice, later)
                best[total, rows] = np.minimum(best[total, rows], choice.min(axis=1, initial=np.inf))
        return best

    def _near(self, units: int, limit_s: float) -> list[slice]:
        """By the number of last units, from 0 to all: the range of states where their stages may begin.

        No stage takes longer than the limit, so p units compute for at most p times the limit: this bounds the compute
        before and after the state where the last p units begin. No units begin at the stop. The caller raises the limit
        until the result is within it.
        """
        space, of_bytes = self.tables.space, self.tables.of_bytes
        left = np.arange(units + 1)
        low, high = np.zeros(len(left), dtype=np.int64), np.full(len(left), len(space))
        if not of_bytes and np.isfinite(limit_s):
            compute_s, each_s = space.compute_s, limit_s * (1 + SLACK) * space.devices_inside(self.level)
            slack_s = SLACK * compute_s[-1]
            low = np.searchsorted(compute_s, compute_s[self.stop] - left * each_s - slack_s, side="left")
            most_s = compute_s[self.start] + (units - left) * each_s + slack_s
            high = np.searchsorted(compute_s, most_s, side="right")
        if not of_bytes and len(space.levels) == 1:
            low = np.maximum(low, [int(np.argmax(self.tables.fewest <= count)) for count in left.tolist()])
            high = np.minimum(high, np.asarray(self._farthest(units)) + 1)
        every = [slice(a, max(a, b)) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        return [slice(self.stop, self.stop + 1), *every[1:]]

    def _farthest(self, units: int) -> list[int]:
        """By the number of last units: the last state that stages on the other units reach within their memory."""
        reach, farthest = self.tables.reach, [0] * (units + 1)
        for left in reversed(range(units)):
            stages = (
                (1 + downstream_each(left, first), farthest[left + first]) for first in range(1, units - left + 1)
            )
            farthest[left] = max(int(reach(held)[start]) for held, start in stages)
        return farthest

    def _stage_s(self, units: int, downstream: int, rows: slice, columns: slice) -> FloatArray:
        return self.tables.stage_s(self.level, units, downstream, self.beyond, rows, columns)

    def preferred(self, units: int, cost_s: float) -> Stages:
        """The preferred stages among those within the cost, in seconds.

        Fewer stages come first, then fewer bytes sent, then smaller cuts, then fewer units on the earlier stages.
        """
        limit_s = cost_s * (1 + 2 * ROUNDING)

        # the fewest stages, and among those the fewest bytes, by units and first state
        shape = (units + 1, len(self.tables.space))
        count, sent = np.full(shape, np.inf), np.full(shape, np.inf)
        count[0, self.stop] = sent[0, self.stop] = 0.0
        near = self._near(units, limit_s)
        for total, rows in enumerate(near[1:], start=1):
            for first in range(1, total + 1):
                columns = near[total - first]
                stages, moved = self._choices((count, sent), first, total - first, limit_s, rows, columns)
                fewest = stages.min(axis=1, initial=np.inf)
                least = np.where(stages == fewest[:, None], moved, np.inf).min(axis=1, initial=np.inf)
                known, bytes_known = count[total, rows], sent[total, rows]
                lesser = (fewest < known) | ((fewest == known) & (least < bytes_known))
                count[total, rows] = np.where(lesser, fewest, known)
                sent[total, rows] = np.where(lesser, least, bytes_known)

        # read off from the front: the smallest cut, then the fewest units
        taken, here, left = [], self.start, units
        while left > 0:
            choices = []
            for first in range(1, left + 1):
                rows, columns = slice(here, here + 1), near[left - first]
                stages, moved = self._choices((count, sent), first, left - first, limit_s, rows, columns)
                best = (stages[0] == count[left, here]) & (moved[0] <= sent[left, here] * (1 + ROUNDING))
                choices += [(columns.start + int(stop), first) for stop in np.flatnonzero(best)]
            stop, first = min(choices)
            taken.append((here, stop, first))
            here, left = stop, left - first
        return tuple(taken)

    def _choices(
        self,
        ranks: tuple[FloatArray, FloatArray],
        units: int,
        downstream: int,
        limit_s: float,
        rows: slice,
        columns: slice,
    ) -> tuple[FloatArray, FloatArray]:
        """The number of stages, and the bytes sent, if a stage on `units` from `rows` to `columns` comes first.

        `ranks` has both for what is downstream, by units and state. Infinite where the stage exceeds the limit.
        """
        space, (count, sent) = self.tables.space, ranks
        at_stop = np.arange(len(space))[columns] == self.stop
        boundary = np.where(at_stop, 0.0, self.tables.boundaries_s(self.level)[columns])
        within = (self._stage_s(units, downstream, rows, columns) <= limit_s) & (boundary <= limit_s)
        weight_bytes = space.weight_bytes[columns] - space.weight_bytes[rows, None]
        boundary_bytes = np.where(at_stop, 0.0, 2 * space.boundary_bytes[columns])
        moved = space.exchange * (units - 1) / units * weight_bytes + boundary_bytes
        downstream_count, downstream_sent = count[downstream, columns], sent[downstream, columns]
        return np.where(within, 1 + downstream_count, np.inf), np.where(within, moved + downstream_sent, np.inf)
