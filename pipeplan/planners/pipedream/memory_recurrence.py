"""Memory recurrence: PipeDream's recurrence (2018, section 3.2; SOSP 2019, section 3.1) with a limit on memory.

It finds the exact partition where memory decides and the closed form of `fitting` is not enough. The papers split off
the last stage and do not consider memory. Here, memory depends on the minibatches in flight, and these depend on the
devices downstream of a stage. So the first stage is split off: when it is added, the devices downstream of it are
known. The steps have the numbers of `space`.

    V^k(a..b, p | d) = min over s, m of max(T^k(a..s, m), 2 a_s / B_k, V^k(s..b, p - m | d))      V^k(b..b, 0 | d) = 0

in seconds a minibatch, is the time of the best pipeline from state a to state b on p units of level k of U devices
each. The units belong to one replica of an outer stage; d is the number of devices downstream of that outer stage,
divided by its replicas. On the outermost level d is 0.

A stage of r devices has 1 + ceil(devices downstream / r) minibatches in flight (2018, section 3.3). A stage that does
not fit its device takes infinitely long. With n states and M units, one level takes O(n^2 M^2). Each further level
multiplies this by n and by the number of different d.

On a single level, messages count as well. Those of a stage depend on the replicas of the stages before and after it
(`fitting.Neighbours`), which become parameters:

    V(a, p, r | q) = min over s, t of max(T(a..s, r), 2 a_s / B, V(s, p - r, t | r))

is the time of the best pipeline from state a to the end on p devices, r of them its first stage's, after a stage of q
replicas (0: none). T is infinite where the stage does not fit between stages of q and t. All t are solved together, and
all q for the stages that fit with any. O(n^2 M^3).
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.pipedream.fitting import Memory
from pipeplan.planners.pipedream.from_end import Combine, FromEnd, fewest_sent
from pipeplan.planners.pipedream.probe import Stages
from pipeplan.planners.pipedream.space import ROUNDING, PartitionSpace
from pipeplan.programs.in_transit import InTransit

CALL_ENTRIES = 10_000
"""Entries compared in the time that numpy needs for the smallest table of stages."""

_AT_ONCE = 2**15
"""Entries that are compared at once, to stay in a processor's cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InnerTables:
    """T^k, and the tables V^k of the levels inside, each made when it is first needed."""

    space: PartitionSpace
    memory: Memory
    _values: dict[tuple[int, int], FloatArray] = field(default_factory=dict)

    def stage_s(self, level: int, units: int, downstream: int, beyond: int) -> FloatArray:
        """T^k in seconds of the stages from each state to each, on `units` units; infinite where none fits.

        `downstream` counts units of this level downstream of the stage; `beyond` is d, in devices.
        """
        space = self.space
        if level > 0:
            after = downstream_each(downstream * space.devices_inside(level) + beyond, units)
            inside = self.values(level - 1, after)[-1]
        else:
            # V^0: the compute of the stages that fit a device
            compute_s = space.compute_s - space.compute_s[:, None]
            held = 1.0 + downstream_each(downstream + beyond, units)
            inside = np.where(self._most_in_flight >= held, compute_s, np.inf)

        # steps 1 and 2: T^k(a..s, m) = 1/m max(V^{k-1}(a..s, all units | ((p - m) U + d) / m), W_k(m))
        weight_bytes = space.weight_bytes - space.weight_bytes[:, None]
        return np.asarray(np.maximum(inside, space.exchange_s(level, weight_bytes, units)) / units)

    @cached_property
    def _most_in_flight(self) -> FloatArray:
        """Each stage's capacity in minibatches in flight, exact to the byte; 0 where there is no stage."""
        every, limit = np.arange(len(self.space)), self.memory.law.limit_bytes
        stages = np.triu(np.ones((len(every), len(every)), dtype=bool), k=1)
        most = self.memory.most_in_flight(every, every)
        with np.errstate(invalid="ignore"):  # minibatches without bytes: infinity times 0
            most -= self.memory.held_bytes(every, every, most) > limit
            most += self.memory.held_bytes(every, every, most + 1) <= limit
        return np.where(stages if self.space.before is None else self.space.before, most, 0.0)

    def values(self, level: int, beyond: int) -> FloatArray:
        """V^k in seconds, for d = `beyond`: of the shape (units, states, states), the first entry for one unit."""
        key = (level, beyond)
        if key in self._values:
            return self._values[key]
        tables: list[FloatArray] = []
        for units in range(1, self.space.levels[level].units + 1):
            # step 3, one stage: nothing of this level downstream; then step 4, several
            best = self.stage_s(level, units, 0, beyond)
            for first in range(1, units):
                stage_s = self.stage_s(level, first, units - first, beyond)
                later = np.maximum(tables[units - first - 1], self.space.boundaries_s(level)[:, None])
                best = np.minimum(best, _joined(stage_s, later))
            tables.append(best)
        self._values[key] = np.stack(tables)
        return self._values[key]


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
class MemoryRecurrence(FromEnd):
    """The pipelines from `start` to `stop` on one level, with d = `beyond`; messages count if it `has_neighbours`."""

    tables: InnerTables
    level: int
    beyond: int = 0

    @property
    def work(self) -> float:
        """An estimate of the entries that all tables compare: an inner level has a table for each d."""
        space, units = self.tables.space, self.units
        states = len(space)
        work = (states**2 / 4.0 + CALL_ENTRIES) * units**2 * (1.0 + units / 6 if self.has_neighbours else 1.0)
        tables, around = 1.0, units
        for level in reversed(range(self.level)):
            tables = min(tables * around**2 / 2, float(space.devices_inside(len(space.levels))))
            around = space.levels[level].units
            work += (states**3 / 6.0 + CALL_ENTRIES) * around**2 * tables
        return work

    def optimum(self, *, fewer: bool = False) -> tuple[float, Stages] | None:
        """The least bottleneck in seconds and its stages, on all units, or on `fewer`. None if none fit."""
        boundaries_s = self.tables.space.boundaries_s(self.level)
        every = range(1, self.units + 1) if fewer else (self.units,)
        values = self.values(self._stage_s, boundaries_s, np.maximum)
        least_s = {total: float(values[total][:, 0, self.start].min()) for total in every}
        cost_s = min(least_s.values())
        if not np.isfinite(cost_s):
            return None
        limit_s = cost_s * (1 + 2 * ROUNDING)
        total = min(total for total in every if least_s[total] <= limit_s)

        def within(first: int, later: int) -> BoolArray:
            return self._stage_s(first, later) <= limit_s

        every_state = np.arange(len(boundaries_s))
        return cost_s, fewest_sent(self, self.tables.space, every_state, within, boundaries_s <= limit_s, total)

    def _stage_s(self, first: int, later: int) -> FloatArray:
        return self.tables.stage_s(self.level, first, later, self.beyond)

    def with_stage(self, stage: FloatArray, first: int, later: int, after: FloatArray, combine: Combine) -> FloatArray:
        """V by q and state.

        The messages of a stage are a number of its inputs, which depends on q, and of its outputs, which depends on t.
        So the least value after a stage that may have e outputs is a running minimum over the numbers of outputs.
        """
        if not self.has_neighbours:
            return super().with_stage(stage, first, later, after, combine)
        spare_bytes, inputs, outputs = self._messages(first, later)
        sent_bytes = self.tables.memory.states.boundary_bytes
        by_outputs = np.argsort(outputs, kind="stable")
        outputs, least = outputs[by_outputs], np.minimum.accumulate(after[by_outputs], axis=0)

        # stages that fit with the most messages, for all q at once
        some, most_bytes = np.isfinite(stage), inputs.max() * sent_bytes[:, None] + outputs[-1] * sent_bytes
        fits = some & (most_bytes <= spare_bytes)
        best = combine(np.where(fits, stage, np.inf), least[-1]).min(axis=1)
        values = np.tile(best, (len(inputs), 1))

        # stages that fit with some messages: the most outputs that each may have, by q
        a, b = np.nonzero(some & ~fits)
        if len(a) == 0:
            return values
        least = np.concatenate((np.full_like(least[:1], np.inf), least))
        starts, place = np.unique(a, return_index=True)
        for count in np.unique(inputs):
            left_bytes = spare_bytes[a, b] - count * sent_bytes[a]
            with np.errstate(divide="ignore", invalid="ignore"):
                allowed = np.where(sent_bytes[b] > 0, left_bytes // sent_bytes[b], np.where(left_bytes < 0, -1, np.inf))
            value = combine(stage[a, b], least[np.searchsorted(outputs, allowed, side="right"), b])
            values[np.ix_(inputs == count, starts)] = np.minimum(best[starts], np.minimum.reduceat(value, place))
        return values

    def _messages(self, first: int, later: int) -> tuple[FloatArray, IntArray, IntArray]:
        """The bytes that stages leave for messages; the numbers of inputs by q, and of outputs by t."""
        memory, every = self.tables.memory, np.arange(len(self.tables.space))
        held_bytes = memory.held_bytes(every, every, 1.0 + downstream_each(later, first))
        before = [memory.messages((q, first, min(later, 1), later)) for q in range(self.units - first - later + 1)]
        after = [memory.messages((0, first, t, later)) for t in (range(1, later + 1) if later else (0,))]
        kept = InTransit(kept_outputs=after[0].kept_outputs)
        spare_bytes = memory.law.limit_bytes - held_bytes - memory.message_bytes(every, every, kept)
        return spare_bytes, np.array([each.inputs for each in before]), np.array([each.outputs for each in after])

    def fits(self, here: int, before: int, first: int, later: int) -> BoolArray:
        """By t and state, whether a stage from `here` to there fits with its messages."""
        if not self.has_neighbours:
            return super().fits(here, before, first, later)
        spare_bytes, inputs, outputs = self._messages(first, later)
        boundary_bytes = self.tables.memory.states.boundary_bytes
        sent_bytes = outputs[:, None] * boundary_bytes
        return np.asarray(inputs[before] * boundary_bytes[here] + sent_bytes <= spare_bytes[here])
