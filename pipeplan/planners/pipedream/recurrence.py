"""Level: the exact optimum of one level of the network, for any two states, with the levels inside it as its units.

A bottleneck is probed (`probe`); what is found is set to its true cost, until a probe shows that nothing
below it is there. Where a unit is itself a network, the probe uses bounds of what the unit can do: no plan is better
than all its devices sharing the compute, none worse than data parallelism over all of them. Only stages that lie on
the way of a found plan and whose bounds differ are solved inside.
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
"""Of a known time: what is tested first where no bound but 0 is known."""

_FIRST_STEP = 0.005
"""How far above a bound the search begins: plans are often near."""

_NEAR_ENOUGH = 1.03
"""Where what is found may well be the optimum: then the next test is just below it."""

_NEAR = 24
"""States that are solved together with the one that is asked for: some may be asked for next."""

_MANY_UNITS = 256
"""Beyond so many it would take longer to bound what lies inside than to look."""

_SMALL = 1_000_000
"""Entries that the bare recurrence compares on a few states and units, where it is the quickest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimum:
    """The least bottleneck from one state to another, stages that reach it, and the probe that refutes all below."""

    cost_s: float
    stages: Stages
    refuted_s: float
    refutation: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelStep:
    """What is tested next: so much `up` from what is refuted, as long as nothing was found; then half-way, and, where
    little is left, just below what was found.
    """

    up: float = 0.0
    refuted: bool = False

    def to_test_s(self, low_s: float, high_s: float) -> float:
        """A bottleneck above what is refuted and below what was found."""
        top_s = high_s * (1 - STEP)
        if self.refuted and high_s < low_s * _NEAR_ENOUGH:
            return top_s
        middle_s = low_s * (1 + self.up) if self.up else math.sqrt(low_s * high_s)
        return min(max(middle_s, low_s * (1 + STEP), high_s * NOTHING), top_s)

    def after(self, found: bool) -> "LevelStep":
        """Steps up grow as long as nothing is found."""
        if found:
            return LevelStep()
        return LevelStep(up=min(4 * self.up, max(self.up, 1.0)), refuted=not self.up)


class LevelSearch:
    """One level and those inside it."""

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
        known = self.known.get(start)
        if known is None or len(known) <= stop or np.isnan(known[stop]):
            known = self._learn(start, stop)
        return float(known[stop])

    def _learn(self, start: int, stop: int) -> FloatArray:
        """What one unit takes from a state, exactly: to one stop, or at little more cost to all that are as near."""
        if self.inner is None:
            raise ValueError("a device is no network")
        near = max(stop, min(start + _NEAR, self.space.last))
        at_once = self.inner.small(start, near)
        before = self.known.get(start, np.empty(0))
        known = np.full(max((near if at_once else stop) + 1, len(before)), np.nan)
        known[: len(before)] = before
        if at_once:
            known[start + 1 : near + 1] = self.inner.small_optima_s(start, near)
        else:
            known[stop] = self.inner.optimum_s(start, stop)
        self.known[start] = known
        return known

    def optimum_s(self, start: int, stop: int) -> float:
        """The least bottleneck between two states."""
        if (start, stop) not in self._optima and self.small(start, stop):
            return float(self.small_optima_s(start, stop)[-1])
        return self.optimum(start, stop).cost_s

    def small(self, start: int, stop: int) -> bool:
        """Whether the bare recurrence is the quickest, on this level and those inside."""
        here = self.space.before is None and not self.fewer
        here = here and ((stop - start) * self.units) ** 2 <= _SMALL
        return here and (self.inner is None or self.inner.small(start, stop))

    def small_optima_s(self, start: int, stop: int) -> FloatArray:
        """The least bottlenecks from one state to each up to another, on a chain, by the bare recurrence."""
        unit_s = self._units_s(start, stop)
        states = slice(start, stop + 1)
        weight_bytes = np.subtract.outer(self.space.weight_bytes[states], self.space.weight_bytes[states]).T
        counts = np.arange(1.0, self.units + 1)[:, None, None]
        stage_s = np.maximum(unit_s, self.space.exchange_s(self.level, weight_bytes, counts)) / counts
        cut_s = 2.0 * self.space.boundary_bytes[states] / self.space.levels[self.level].bandwidth_bytes_per_s
        return bare_recurrence(stage_s, cut_s)

    def _units_s(self, start: int, stop: int) -> FloatArray:
        """What a unit takes from each of a few states to each other; infinite where no stage is."""
        states = slice(start, stop + 1)
        if self.inner is None:
            unit_s = np.subtract.outer(self.space.compute_s[states], self.space.compute_s[states]).T
        else:
            unit_s = np.stack([self._known_to(row, stop)[states] for row in range(start, stop + 1)])
        unit_s[np.tri(stop - start + 1, dtype=bool)] = np.inf
        return unit_s

    def _known_to(self, start: int, stop: int) -> FloatArray:
        """What one unit takes from a state to all up to another; what is asked for was not too much."""
        known = self.known.get(start)
        if known is None or len(known) <= stop or np.isnan(known[start + 1 : stop + 1]).any():
            known = self._learn(start, stop) if start < stop else np.full(stop + 1, np.inf)
        return known

    def optimum(self, start: int, stop: int) -> Optimum:
        """The best on all units (`fewer`: on at most all)."""
        if (start, stop) not in self._optima:
            self._optima[start, stop] = self._search(start, stop)
        return self._optima[start, stop]

    def _search(self, start: int, stop: int) -> Optimum:
        everything = ((start, stop, self.units),)
        best = Optimum(cost_s=self.stage_s(*everything[0]), stages=everything, refuted_s=0.0)
        low_s, table = self.bound_s(start, stop), None
        between = self.space.within(start, stop)
        step = LevelStep(up=_FIRST_STEP)
        while best.cost_s * (1 - STEP) > low_s:
            bottleneck_s = step.to_test_s(low_s, best.cost_s)
            found, probed = self.probe(between, bottleneck_s)
            if found is not None:
                best = self.measured(found)
                between = self._alive(probed, bottleneck_s)
            else:
                low_s, table = bottleneck_s, probed
            step = step.after(found is not None)
        return Optimum(cost_s=best.cost_s, stages=best.stages, refuted_s=low_s, refutation=table)

    def refutation(self, start: int, stop: int) -> Optimum:
        """The optimum with a table that refutes all below it, wherever bounds alone had done so."""
        optimum = self.optimum(start, stop)
        below_s = optimum.cost_s * (1 - STEP)
        if optimum.refutation is not None and optimum.refuted_s >= below_s * (1 - STEP):
            return optimum
        _, table = self.probe(self.space.within(start, stop), below_s)
        return replace(optimum, refuted_s=below_s, refutation=table)

    def measured(self, stages: Stages) -> Optimum:
        """Stages at their true cost, boundaries included."""
        cuts = np.asarray([stop for _, stop, _ in stages[:-1]], dtype=np.int64)
        boundary_s = 2.0 * self.space.boundary_bytes[cuts] / self.space.levels[self.level].bandwidth_bytes_per_s
        slowest_s = max(self.cost_s(stages), float(boundary_s.max(initial=0.0)))
        return Optimum(cost_s=slowest_s, stages=stages, refuted_s=0.0)

    def cost_s(self, stages: Stages) -> float:
        """The slowest of these stages, exactly: only those whose bounds differ need be solved inside."""
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
        """No plan is faster: all devices share the compute, and on a chain some stage holds each single block."""
        space = self.space
        total_s = float(space.compute_s[stop] - space.compute_s[start]) / (self.devices * self.units)
        if space.before is not None or self.units == 1:
            return total_s
        compute_s = np.diff(space.compute_s[start : stop + 1]) / self.devices
        exchange_s = space.exchange_s(self.level, np.diff(space.weight_bytes[start : stop + 1]), self.units)
        least_s = np.minimum(compute_s, np.maximum(compute_s, exchange_s) / self.units)
        return max(total_s, float(least_s.max()))

    def needs(self, bottleneck_s: float, start: int, stop: int) -> UnitsNeeded:
        """The closed form at a bottleneck, between two states."""
        return UnitsNeeded(
            space=self.space,
            level=self.level,
            bottleneck_s=bottleneck_s,
            devices=self.devices,
            furthest=self._furthest_of_a_unit(bottleneck_s, start, stop),
            known=self.known,
        )

    def states(self, between: IntArray, bottleneck_s: float) -> IntArray:
        """Those of some states that may be cut within a bottleneck, and the first and the last."""
        allowed = self.space.allowed(self.level, bottleneck_s)[between]
        allowed[[0, -1]] = True
        return between[allowed]

    def probe(self, between: IntArray, bottleneck_s: float) -> tuple[Stages | None, Table]:
        """Stages from the first to the last of these states within the bottleneck, or a table without a way."""
        states = self.states(between, bottleneck_s)
        needs = self.needs(bottleneck_s, int(between[0]), int(between[-1]))
        while True:
            self.probes += 1
            stages, table = self._try(needs, states)
            # of devices the closed form says all; of networks a stage may turn out slower, and be looked at again
            if stages is None or self.inner is None or self.cost_s(stages) <= bottleneck_s * (1 + 2 * ROUNDING):
                return stages, table

    def _alive(self, table: Table, bottleneck_s: float) -> IntArray:
        """The states that a way within this or a lesser bottleneck may pass: others need too much on both sides."""
        needs = UnitsNeeded(space=self.space, level=self.level, bottleneck_s=bottleneck_s, devices=self.devices)
        return table.states[table.least + units_before(needs, table.states) <= self.units]

    def _try(self, needs: UnitsNeeded, states: IntArray) -> tuple[Stages | None, Table]:
        """One look with the bounds known so far: stages that may be within the bottleneck, on all units."""
        table = least_units(needs, states, self.units)
        if table.least[0] > self.units:
            return None, table
        stages = path(table)
        if self.fewer or table.least[0] == self.units or any(units > 1 for _, _, units in stages):
            return self.spread(stages), table
        replicas = least_with_replicas(needs, table)
        if replicas.least[0] <= self.units:
            return self.spread(path_with_replicas(needs, table, replicas)), table
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

    def _furthest_of_a_unit(self, bottleneck_s: float, start: int, stop: int) -> IntArray | None:
        if self.inner is None or self.inner.units > _MANY_UNITS or self.space.before is not None:
            return None
        furthest = np.arange(len(self.space))
        furthest[start : stop + 1] = self.inner.furthest(bottleneck_s, start, stop)
        return furthest

    def furthest(self, bottleneck_s: float, start: int, stop: int) -> IntArray:
        """On a chain, the last state that at most all units of this level reach from each between two.

        At best: compute and exchange of a stage on m units alone bound how far it goes, and a unit inside likewise.
        """
        reach = [self._reach(bottleneck_s, units, start, stop) for units in range(1, self.units + 1)]
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

    def _reach(self, bottleneck_s: float, units: int, start: int, stop: int) -> IntArray:
        """How far one stage on so many units goes at best, from each state."""
        space, within_s = self.space, bottleneck_s * units * (1 + ROUNDING)
        part = slice(start, stop + 1)
        reach = _last_within(space.compute_s[part], within_s * self.devices)
        if units > 1:
            within_bytes = within_s / float(space.exchange_s(self.level, 1.0, units))
            reach = np.minimum(reach, _last_within(space.weight_bytes[part], within_bytes))
        elif self.inner is not None and self.inner.units <= _MANY_UNITS:
            reach = np.minimum(reach, self.inner.furthest(bottleneck_s, start, stop) - start)
        return reach


def _last_within(sums: FloatArray, allowance: float) -> IntArray:
    """From each entry of rising sums, the last whose difference is within the allowance.

    A sum that is large beside the allowance is rounded by more than what matters: so differences decide. Two steps
    back are enough but where many entries lie that close; then the answer is too far.
    """
    last = np.searchsorted(sums, (sums + allowance) * (1 + ROUNDING), side="right") - 1
    for _ in range(2):
        last = last - (sums[last] - sums > allowance)
    return np.asarray(last)


def bare_recurrence(stage_s: FloatArray, cut_s: FloatArray) -> FloatArray:
    """A from the first state to each other: from stages by units less one, start and stop, and what a cut takes."""
    units, states, _ = stage_s.shape
    before_s = np.empty((units, states))
    best = stage_s[0, 0]
    for count in range(units):
        best = stage_s[count, 0]
        if count > 0:
            joined = np.maximum(
                before_s[count - 1 :: -1, :, None] if count > 1 else before_s[:1, :, None], stage_s[:count]
            )
            best = np.minimum(best, joined.min(axis=(0, 1)))
        before_s[count] = np.maximum(best, cut_s)
    return np.asarray(best[1:])
