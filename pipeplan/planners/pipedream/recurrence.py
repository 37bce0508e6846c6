"""Recurrence: PipeDream's recurrence A, solved exactly (2018, section 3.2; by levels SOSP 2019, section 3.1).

A^k(i->j, m) is the time of the slowest stage, in seconds a minibatch, of the best pipeline from state i to state j on m
units of level k. `space` defines the terms and numbers the steps. `LevelSearch` computes an entry without the papers'
table, for any number of units: a `probe` decides whether a pipeline stays within a given bottleneck. If one does, its
true cost is the best so far, and the next probe has a smaller bottleneck. The search ends when a probe just below the
best cost finds none. (`from_end` has the table, for what depends on the stages downstream.)

A unit of an outer level is itself a network. Step 2 then needs A^{k-1}, which has no closed form, and the probe uses
two bounds instead. The lower bound shares the compute equally among all devices of the unit. The upper bound is data
parallelism over all of them. Only where the two bounds differ, and only for the stages of a pipeline that was found, is
the inner level solved.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.pipedream.probe import (
    Stages,
    Table,
    UnitsNeeded,
    least_units,
    least_with_replicas,
    path,
    path_with_replicas,
    straight_path,
    units_before,
)
from pipeplan.planners.pipedream.space import ROUNDING, STEP, PartitionSpace

NOTHING = 1e-18
"""The first bottleneck to test where the lower bound is 0, as a share of the best cost so far."""

_FIRST_STEP = 0.005
"""The first bottleneck's distance from the lower bound, as a share of it: the optimum is often near its bound."""

_NEAR_ENOUGH = 1.03
"""Ratio of the best cost to the refuted bottleneck. Below it, the next test is just under the best cost."""

_MANY_UNITS = 256
"""Inner levels of more units are not bounded by `furthest`: it takes longer than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimum:
    """The least bottleneck from one state to another, and stages whose slowest one takes as long.

    No pipeline stays within `refuted_s` seconds; `refutation` is the table of the probe that showed it.
    """

    cost_s: float
    stages: Stages
    refuted_s: float
    refutation: Table | None = None


class LevelSearch:
    """The optima A^k of one level; `inner` has those of the level inside it.

    A pipeline takes all units of the level, or with `fewer` at most all. Results are cached: `known[a][b]` is
    A^{k-1}(a..b, all units inside) in seconds, NaN where it was not computed. `probes` counts the probes.
    """

    def __init__(self, space: PartitionSpace, level: int, *, fewer: bool = False) -> None:
        self.space = space
        self.level = level
        self.units = space.levels[level].units
        self.fewer = fewer
        self.devices = space.devices_inside(level)
        self.inner = LevelSearch(space, level - 1) if level > 0 else None
        self.known: dict[int, FloatArray] = {}
        self.probes = 0
        self._optima: dict[tuple[int, int], Optimum] = {}

    @cached_property
    def parallel_s_per_byte(self) -> float:
        """Seconds a byte of weights that data parallelism over all devices of this level takes to exchange them."""
        own = float(self.space.exchange_s(self.level, 1.0, self.units))
        inside = self.inner.parallel_s_per_byte if self.inner else 0.0
        return max(inside, own) / self.units

    def stage_s(self, start: int, stop: int, units: int) -> float:
        """T^k(start..stop, units) in seconds, exactly."""
        # step 1: W_k(m)
        weight_bytes = self.space.weight_bytes[stop] - self.space.weight_bytes[start]
        exchange_s = float(self.space.exchange_s(self.level, weight_bytes, units))

        # A^{k-1} of one unit; its upper bound is enough if it is at most the exchange, or equals the lower bound
        unit_s = float(self.space.compute_s[stop] - self.space.compute_s[start])
        if self.inner is not None:
            least_s = unit_s / self.devices
            unit_s = max(least_s, float(weight_bytes) * self.inner.parallel_s_per_byte)
            if unit_s > max(exchange_s, least_s):
                unit_s = self._unit_s(self.inner, start, stop)

        # step 2
        return max(unit_s, exchange_s) / units

    def _unit_s(self, inner: "LevelSearch", start: int, stop: int) -> float:
        """A^{k-1} from a state to a stop, exactly."""
        known = self.known.get(start, np.empty(0))
        if len(known) <= stop:
            known = np.concatenate((known, np.full(stop + 1 - len(known), np.nan)))
            self.known[start] = known
        if np.isnan(known[stop]):
            known[stop] = inner.optimum(start, stop).cost_s
        return float(known[stop])

    def optimum(self, start: int, stop: int) -> Optimum:
        """A^k(start..stop, all units) and stages that reach it, by probes."""
        if (start, stop) in self._optima:
            return self._optima[start, stop]
        everything = ((start, stop, self.units),)
        # step 3: a single stage is the first candidate
        best = Optimum(cost_s=self.stage_s(*everything[0]), stages=everything, refuted_s=0.0)
        low_s, table = self.bound_s(start, stop), None
        between = self.space.within(start, stop)
        above = _FIRST_STEP  # until a pipeline is found: how far the next bottleneck is above the refuted one

        # step 4: several stages, each probe with all choices of i and m' at once
        while best.cost_s * (1 - STEP) > low_s:
            top_s = best.cost_s * (1 - STEP)
            middle_s = low_s * (1 + above) if above else math.sqrt(low_s * best.cost_s)
            bottleneck_s = min(max(middle_s, low_s * (1 + STEP), best.cost_s * NOTHING), top_s)
            if not above and best.cost_s < low_s * _NEAR_ENOUGH:
                bottleneck_s = top_s
            found, probed = self.probe(between, bottleneck_s)
            if found is not None:
                best, above = self.measured(found), 0.0
                # drop the states that need too many units on both sides: smaller bottlenecks need no fewer
                needs = UnitsNeeded(space=self.space, level=self.level, bottleneck_s=bottleneck_s, devices=self.devices)
                between = probed.states[probed.least + units_before(needs, probed.states) <= self.units]
            else:
                low_s, table, above = bottleneck_s, probed, min(4 * above, 1.0)
        optimum = Optimum(cost_s=best.cost_s, stages=best.stages, refuted_s=low_s, refutation=table)
        self._optima[start, stop] = optimum
        return optimum

    def refutation(self, start: int, stop: int) -> Optimum:
        """The optimum, with a table that refutes every lower bottleneck.

        `optimum` has no such table where its bounds met without a probe; this method makes one.
        """
        optimum = self.optimum(start, stop)
        below_s = optimum.cost_s * (1 - STEP)
        if optimum.refutation is not None and optimum.refuted_s >= below_s * (1 - STEP):
            return optimum
        _, table = self.probe(self.space.within(start, stop), below_s)
        return replace(optimum, refuted_s=below_s, refutation=table)

    def measured(self, stages: Stages) -> Optimum:
        """These stages with their true cost: the slowest stage or boundary."""
        cuts = np.asarray([stop for _, stop, _ in stages[:-1]], dtype=np.int64)
        boundary_s = 2.0 * self.space.boundary_bytes[cuts] / self.space.levels[self.level].bandwidth_bytes_per_s
        slowest_s = max(self.cost_s(stages), float(boundary_s.max(initial=0.0)))
        return Optimum(cost_s=slowest_s, stages=stages, refuted_s=0.0)

    def cost_s(self, stages: Stages) -> float:
        """Seconds of the slowest stage, exactly. The inner level is solved only for stages whose bounds differ."""
        start, stop, units = np.asarray(stages).T
        compute_s = (self.space.compute_s[stop] - self.space.compute_s[start]) / self.devices
        weight_bytes = self.space.weight_bytes[stop] - self.space.weight_bytes[start]
        exchange_s = self.space.exchange_s(self.level, weight_bytes, units)
        known_s = np.maximum(compute_s, exchange_s) / units
        if self.inner is None:
            return float(known_s.max())
        open_ = np.flatnonzero(weight_bytes * self.inner.parallel_s_per_byte > np.maximum(compute_s, exchange_s))
        return max(float(known_s.max()), *(self.stage_s(*stages[index]) for index in open_), 0.0)

    def bound_s(self, start: int, stop: int) -> float:
        """A lower bound in seconds of every pipeline between two states.

        All devices together do the compute. On a chain, some stage also holds the most expensive block.
        """
        space = self.space
        total_s = float(space.compute_s[stop] - space.compute_s[start]) / (self.devices * self.units)
        if space.before is not None or self.units == 1:
            return total_s
        compute_s = np.diff(space.compute_s[start : stop + 1]) / self.devices
        exchange_s = space.exchange_s(self.level, np.diff(space.weight_bytes[start : stop + 1]), self.units)
        least_s = np.minimum(compute_s, np.maximum(compute_s, exchange_s) / self.units)
        return max(total_s, float(least_s.max()))

    def needs(self, bottleneck_s: float, start: int, stop: int) -> UnitsNeeded:
        """The least units of every stage between two states, at a bottleneck: step 2 solved for m."""
        furthest = None
        if self.inner is not None and self.inner.units <= _MANY_UNITS and self.space.before is None:
            furthest = np.arange(len(self.space))
            furthest[start : stop + 1] = self.inner.furthest(bottleneck_s, start, stop)
        return UnitsNeeded(
            space=self.space,
            level=self.level,
            bottleneck_s=bottleneck_s,
            devices=self.devices,
            furthest=furthest,
            known=self.known,
        )

    def states(self, between: IntArray, bottleneck_s: float) -> IntArray:
        """Those of the states `between` where a cut takes at most the bottleneck; the first and the last always."""
        allowed = self.space.allowed(self.level, bottleneck_s)[between]
        allowed[[0, -1]] = True
        return between[allowed]

    def probe(self, between: IntArray, bottleneck_s: float) -> tuple[Stages | None, Table]:
        """Stages from the first to the last of these states, within the bottleneck, or None; and the probe's table."""
        states = self.states(between, bottleneck_s)
        needs = self.needs(bottleneck_s, int(between[0]), int(between[-1]))
        while True:
            self.probes += 1
            # stages that may be within the bottleneck, by the bounds known so far, on all units
            table = least_units(needs, states, self.units)
            if table.least[0] > self.units:
                return None, table
            found = path(table)
            if not (self.fewer or table.least[0] == self.units or any(units > 1 for _, _, units in found)):
                # spare units, and every stage has one: from one unit to two T may rise, as the exchange begins
                replicas = least_with_replicas(needs, table)
                if replicas.least[0] <= self.units:
                    found = path_with_replicas(needs, table, replicas)
                else:
                    straight = straight_path(needs, table, self.units)
                    table = replace(table, replicated=replicas.least)
                    if straight is None:
                        return None, table
                    found = straight
            stages = self.spread(found)
            # exact for devices; a stage of networks may turn out slower: then its time is known, and the probe repeats
            if self.inner is None or self.cost_s(stages) <= bottleneck_s * (1 + 2 * ROUNDING):
                return stages, table

    def spread(self, stages: Stages) -> Stages:
        """The stages on all units: the first stage of more than one unit also takes the spare units."""
        left = 0 if self.fewer else self.units - sum(units for _, _, units in stages)
        spread = []
        for start, stop, units in stages:
            extra = left if units > 1 else 0
            left -= extra
            spread.append((start, stop, units + extra))
        return tuple(spread)

    def furthest(self, bottleneck_s: float, start: int, stop: int) -> IntArray:
        """On a chain, by state from start to stop: the last state that all units of this level, or fewer, can reach.

        It is an upper bound. Only compute and exchange limit how far a stage on m units goes, and inner levels are
        bounded in the same way.
        """
        # upper bound on the reach of one stage, by its units and first state
        part, reach = slice(start, stop + 1), list[IntArray]()
        for units in range(1, self.units + 1):
            within_s = bottleneck_s * units * (1 + ROUNDING)
            alone = _last_within(self.space.compute_s[part], within_s * self.devices)
            if units > 1:
                within_bytes = within_s / float(self.space.exchange_s(self.level, 1.0, units))
                alone = np.minimum(alone, _last_within(self.space.weight_bytes[part], within_bytes))
            elif self.inner is not None and self.inner.units <= _MANY_UNITS:
                alone = np.minimum(alone, self.inner.furthest(bottleneck_s, start, stop) - start)
            reach.append(alone)

        # of several stages: the last one begins where the others may be cut
        here = np.arange(stop - start + 1)
        allowed = np.flatnonzero(self.space.allowed(self.level, bottleneck_s)[start : stop + 1])
        nearest = np.searchsorted(allowed, here, side="right") - 1
        cut_at = np.where(nearest >= 0, allowed[nearest], 0) if len(allowed) else np.zeros_like(here)
        ends, furthest = [here], here
        for units in range(1, self.units + 1):
            furthest = np.max([reach[r - 1][ends[units - r]] for r in range(1, units + 1)], axis=0)
            if (furthest == here[-1]).all():
                break
            ends.append(np.maximum(cut_at[furthest], here))
        return np.asarray(furthest + start)


def _last_within(sums: FloatArray, allowance: float) -> IntArray:
    """By entry of the ascending `sums`: the index of the last entry that is higher by at most the allowance.

    The search compares sums, whose rounding may exceed a small allowance. So the differences are compared as well,
    twice, one entry back each time. Where more entries are this close, the answer is too high, as an upper bound may
    be.
    """
    last = np.searchsorted(sums, (sums + allowance) * (1 + ROUNDING), side="right") - 1
    for _ in range(2):
        last = last - (sums[last] - sums > allowance)
    return np.asarray(last)
