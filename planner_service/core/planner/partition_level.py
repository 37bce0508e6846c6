"""Level: the exact optimum of one level of the network, for any two states, with the levels inside it as its units.

A bottleneck is probed (`partition_probe`); what is found is set to its true cost, until a probe shows that nothing
below it is there. Where a unit is itself a network, the probe uses bounds of what the unit can do: no plan is better
than all its devices sharing the compute, none worse than data parallelism over all of them. Only stages that lie on
the way of a found plan and whose bounds differ are solved inside.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner_service.core.cost.compute import IntArray
from planner_service.core.planner.partition_probe import (
    Needs,
    Stages,
    Table,
    least_units,
    least_with_replicas,
    path,
    straight_path,
)
from planner_service.core.planner.partition_space import ROUNDING, STEP, Space

NOTHING = 1e-18
"""Of a known time: what is tested first where no bound but 0 is known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimum:
    """The least bottleneck from one state to another, stages that reach it, and the probe that refutes all below."""

    cost_s: float
    stages: Stages
    refuted_s: float
    refutation: Table | None = None


class Level:
    """One level and those inside it."""

    def __init__(self, space: Space, level: int, *, fewer: bool = False) -> None:
        self.space = space
        self.level = level
        self.units = space.levels[level].units
        self.fewer = fewer
        self.devices = space.devices_inside(level)
        self.inner = Level(space, level - 1) if level > 0 else None
        self.known: dict[int, dict[int, float]] = {}
        self.probes = 0
        self._optima: dict[tuple[int, int], Optimum] = {}

    @cached_property
    def parallel_s_per_byte(self) -> float:
        """What data parallelism over all devices of a level takes to exchange a byte of weights."""
        own = float(self.space.exchange_s(self.level, 1.0, self.units))
        inside = self.inner.parallel_s_per_byte if self.inner else 0.0
        return max(inside, own) / self.units

    def stage_s(self, start: int, stop: int, units: int) -> float:
        """T(start..stop, units), exactly."""
        weight_bytes = self.space.weight_bytes[stop] - self.space.weight_bytes[start]
        exchange_s = float(self.space.exchange_s(self.level, weight_bytes, units))
        return max(self._unit_s(start, stop, exchange_s), exchange_s) / units

    def _unit_s(self, start: int, stop: int, enough_s: float) -> float:
        """A^{k-1}: what a unit takes; a bound at most `enough_s` where that is enough."""
        compute_s = float(self.space.compute_s[stop] - self.space.compute_s[start])
        if self.inner is None:
            return compute_s
        weight_bytes = self.space.weight_bytes[stop] - self.space.weight_bytes[start]
        least_s = compute_s / self.devices
        most_s = max(least_s, float(weight_bytes) * self.inner.parallel_s_per_byte)
        if most_s <= max(enough_s, least_s):
            return most_s
        known = self.known.setdefault(start, {})
        if stop not in known:
            known[stop] = self.inner.optimum(start, stop).cost_s
        return known[stop]

    def optimum(self, start: int, stop: int) -> Optimum:
        """The best on all units (`fewer`: on at most all)."""
        if (start, stop) not in self._optima:
            self._optima[start, stop] = self._search(start, stop)
        return self._optima[start, stop]

    def _search(self, start: int, stop: int) -> Optimum:
        everything = ((start, stop, self.units),)
        best = Optimum(cost_s=self.stage_s(*everything[0]), stages=everything, refuted_s=0.0)
        low_s, table = self.bound_s(start, stop), None
        bisect = True
        while best.cost_s * (1 - STEP) > low_s:
            bottleneck_s = best.cost_s * (1 - STEP)
            if bisect:
                least_s = max(low_s * (1 + STEP), best.cost_s * NOTHING)
                bottleneck_s = min(max(math.sqrt(low_s * best.cost_s), least_s), bottleneck_s)
            found, probed = self.probe(start, stop, bottleneck_s)
            if found is None:
                low_s, table = bottleneck_s, probed
            else:
                best = self.measured(found)
            bisect = found is None or not bisect
            bisect = bisect and best.cost_s > low_s * (1 + 1e-9)
        return Optimum(cost_s=best.cost_s, stages=best.stages, refuted_s=low_s, refutation=table)

    def refutation(self, start: int, stop: int) -> Optimum:
        """The optimum with a table that refutes all below it, wherever bounds alone had done so."""
        optimum = self.optimum(start, stop)
        below_s = optimum.cost_s * (1 - STEP)
        if optimum.refutation is not None and optimum.refuted_s >= below_s * (1 - STEP):
            return optimum
        _, table = self.probe(start, stop, below_s)
        return replace(optimum, refuted_s=below_s, refutation=table)

    def measured(self, stages: Stages) -> Optimum:
        """Stages at their true cost, boundaries included."""
        costs = [self.stage_s(*stage) for stage in stages]
        bandwidth = self.space.levels[self.level].bandwidth_bytes_per_s
        cuts = [2.0 * float(self.space.boundary_bytes[stop]) / bandwidth for _, stop, _ in stages[:-1]]
        return Optimum(cost_s=max(costs + cuts), stages=stages, refuted_s=0.0)

    def bound_s(self, start: int, stop: int) -> float:
        """No plan is faster: all devices share the compute, and on a chain some stage holds each single block."""
        space = self.space
        total_s = float(space.compute_s[stop] - space.compute_s[start]) / (self.devices * self.units)
        if space.before is not None or self.units == 1:
            return total_s
        compute_s = np.diff(space.compute_s[start : stop + 1]) / self.devices
        exchange_s = space.exchange_s(self.level, np.diff(space.weight_bytes[start : stop + 1]), self.units)
        least_s = np.minimum(compute_s, np.maximum(compute_s, exchange_s) / self.units)
        return max(total_s, float(least_s.max()))

    def needs(self, bottleneck_s: float) -> Needs:
        """The closed form at a bottleneck."""
        return Needs(
            space=self.space,
            level=self.level,
            bottleneck_s=bottleneck_s,
            devices=self.devices,
            furthest=self._furthest_of_a_unit(bottleneck_s),
            known=self.known,
        )

    def states(self, start: int, stop: int, bottleneck_s: float) -> IntArray:
        """Those between two states that may be cut within a bottleneck."""
        between = self.space.within(start, stop)
        allowed = self.space.allowed(self.level, bottleneck_s)[between]
        allowed[[0, -1]] = True
        return between[allowed]

    def probe(self, start: int, stop: int, bottleneck_s: float) -> tuple[Stages | None, Table | None]:
        """Stages within the bottleneck, or the table that shows that there are none."""
        states = self.states(start, stop, bottleneck_s)
        needs = self.needs(bottleneck_s)
        while True:
            self.probes += 1
            stages, table = self._try(needs, states)
            if stages is None or all(self.stage_s(*stage) <= bottleneck_s * (1 + 2 * ROUNDING) for stage in stages):
                return stages, table

    def _try(self, needs: Needs, states: IntArray) -> tuple[Stages | None, Table | None]:
        """One look with the bounds known so far: stages that may be within the bottleneck, on all units."""
        table = least_units(needs, states, self.units)
        if table.least[0] > self.units:
            return None, table
        stages = path(needs, table)
        if self.fewer or table.least[0] == self.units or any(units > 1 for _, _, units in stages):
            return self.spread(stages), table
        replicas = least_with_replicas(needs, table)
        if replicas.least[0] <= self.units:
            return self.spread(path(needs, table, replicas)), table
        return straight_path(needs, table, self.units), replace(table, replicated=replicas.least)

    def spread(self, stages: Stages) -> Stages:
        """The units that are left over go to the first stage that has more than one."""
        left = 0 if self.fewer else self.units - sum(units for _, _, units in stages)
        spread = []
        for start, stop, units in stages:
            extra = left if units > 1 else 0
            left -= extra
            spread.append((start, stop, units + extra))
        return tuple(spread)

    def _furthest_of_a_unit(self, bottleneck_s: float) -> IntArray | None:
        return None if self.inner is None or self.space.before is not None else self.inner.furthest(bottleneck_s)

    def furthest(self, bottleneck_s: float) -> IntArray:
        """On a chain, the last state that at most all units of this level reach from each within the bottleneck.

        At best: compute and exchange of a stage on m units alone bound how far it goes, and a unit inside likewise.
        """
        reach = [self._reach(bottleneck_s, units) for units in range(1, self.units + 1)]
        allowed = np.flatnonzero(self.space.allowed(self.level, bottleneck_s))
        cut_at = allowed[np.searchsorted(allowed, np.arange(len(self.space)), side="right") - 1]
        ends = [np.arange(len(self.space))]
        furthest = ends[0]
        for units in range(1, self.units + 1):
            furthest = np.max([reach[r - 1][ends[units - r]] for r in range(1, units + 1)], axis=0)
            ends.append(np.maximum(cut_at[furthest], ends[0]))
        return furthest

    def _reach(self, bottleneck_s: float, units: int) -> IntArray:
        """How far one stage on so many units goes at best, from each state."""
        space, within_s = self.space, bottleneck_s * units * (1 + ROUNDING)
        compute_s = (space.compute_s + within_s * self.devices) * (1 + ROUNDING)
        reach = np.searchsorted(space.compute_s, compute_s, side="right") - 1
        if units > 1:
            allowance = within_s / float(space.exchange_s(self.level, 1.0, units))
            within_bytes = (space.weight_bytes + allowance) * (1 + ROUNDING)
            by_weight = np.searchsorted(space.weight_bytes, within_bytes, side="right") - 1
            return np.asarray(np.minimum(reach, by_weight))
        inside = self._furthest_of_a_unit(bottleneck_s)
        return np.asarray(reach if inside is None else np.minimum(reach, inside))
