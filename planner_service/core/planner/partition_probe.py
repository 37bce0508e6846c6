"""Probe: the least units that stages within a bottleneck t need, from every state to the end.

    R(a) = min over b of need(a, b, t) + R(b)        R(end) = 0

need(a, b, t) is the least m with T(a..b, m) <= t, in closed form: T falls with m but for the step from 1 to 2, where
the exchange begins. m (m - 1) |w| / (m B) <= t m solves to m = z + sqrt(z (z - 2)), z = (factor / 2) |w| / (B t), and
any m >= 2 will do where z <= 2. So t is tested whatever the number of units is.
"""

from dataclasses import dataclass, field

import numpy as np

from planner_service.core.cost.compute import BoolArray, FloatArray, IntArray
from planner_service.core.planner.partition_space import ROUNDING, Space

_BLOCK = 48
"""States that are worked on at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """The closed form of `need` at one bottleneck, for states by their index in the space.

    A unit does work at the rate of its `devices`. `furthest` bounds what one unit can do behind each state where it
    is itself a network; `known` holds what was found of A^{k-1} exactly, by start and end.
    """

    space: Space
    level: int
    bottleneck_s: float
    devices: int
    furthest: IntArray | None = None
    known: dict[int, dict[int, float]] = field(default_factory=dict)

    def block(self, rows: IntArray, columns: IntArray) -> tuple[FloatArray, FloatArray]:
        """By row and column: the least units, and the least of two and more; infinite where no stage is."""
        space = self.space
        load = space.compute_s[columns] - space.compute_s[rows, None]
        load *= (1 - ROUNDING) / (self.bottleneck_s * self.devices)
        single = load <= 1
        if self.furthest is not None:
            single &= columns <= self.furthest[rows, None]
        self._set_known(load, single, rows, columns)
        np.maximum(load, self._exchanging(rows, columns), out=load)
        many = np.maximum(np.ceil(load, out=load), 2.0)
        if columns[0] <= rows[-1] or space.before is not None:
            many[~self._stages(rows, columns)] = np.inf
            single &= many < np.inf
        return np.where(single, 1.0, many), many

    def _exchanging(self, rows: IntArray, columns: IntArray) -> FloatArray:
        space = self.space
        bandwidth = space.levels[self.level].bandwidth_bytes_per_s
        scale = space.exchange / 2 * (1 - ROUNDING) / (bandwidth * self.bottleneck_s)
        z = space.weight_bytes[columns] - space.weight_bytes[rows, None]
        z *= scale
        if z.size == 0 or z.max() <= 2:
            return np.zeros(1)
        root = z - 2
        root *= z
        np.maximum(root, 0, out=root)
        np.sqrt(root, out=root)
        root += z
        return root

    def _stages(self, rows: IntArray, columns: IntArray) -> BoolArray:
        if self.space.before is None:
            return np.asarray(columns > rows[:, None])
        return self.space.before[np.ix_(rows, columns)]

    def _set_known(self, load: FloatArray, single: BoolArray, rows: IntArray, columns: IntArray) -> None:
        """What is known exactly replaces the bounds."""
        for i, row in enumerate(rows.tolist()) if self.known else ():
            for stop, value_s in self.known.get(row, {}).items():
                j = int(np.searchsorted(columns, stop))
                if j < len(columns) and columns[j] == stop:
                    load[i, j] = value_s * (1 - ROUNDING) / self.bottleneck_s
                    single[i, j] = load[i, j] <= 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """R by position among the states that may be cut. Too large where more than there is would be needed in all.

    `replicated`, where it mattered: the same with at least one stage of two units or more.
    """

    states: IntArray
    least: FloatArray
    replicated: FloatArray | None = None


def least_units(needs: Needs, states: IntArray, units: int) -> Table:
    """R for the states, whose first is the start and last the end."""
    last = len(states) - 1
    least = np.full(last + 1, np.inf)
    least[last] = 0.0
    before = units_before(needs, states)
    alive = np.array([last])
    for stop in range(last, 0, -_BLOCK):
        start = max(stop - _BLOCK, 0)
        _relax(needs, states, least, slice(start, stop), alive)
        fresh = np.flatnonzero(least[start:stop] + before[start:stop] <= units) + start
        alive = np.concatenate((fresh, alive))
    return Table(states=states, least=least)


def units_before(needs: Needs, states: IntArray) -> FloatArray:
    """What the blocks before each state need at least."""
    compute_s = needs.space.compute_s
    load = (compute_s[states] - compute_s[states[0]]) * ((1 - ROUNDING) / (needs.bottleneck_s * needs.devices))
    return np.asarray(np.ceil(load))


def _relax(needs: Needs, states: IntArray, least: FloatArray, block: slice, alive: IntArray) -> None:
    """R of a block of states, from the states behind it that are alive, then from one another."""
    rows = states[block]
    need, _ = needs.block(rows, states[alive])
    need += least[alive]
    best = need.min(axis=1)
    need, _ = needs.block(rows, rows)
    for i in reversed(range(len(rows))):
        here = block.start + i
        least[here] = min(best[i], (need[i, i + 1 :] + least[here + 1 : block.stop]).min(initial=np.inf))


def least_with_replicas(needs: Needs, table: Table) -> Table:
    """The least units with at least one stage of two or more: what is left over can then go to it."""
    least = np.full_like(table.least, np.inf)
    for here in reversed(range(len(least) - 1)):
        need, two = needs.block(table.states[here : here + 1], table.states[here + 1 :])
        least[here] = min(
            (need[0] + least[here + 1 :]).min(initial=np.inf), (two[0] + table.least[here + 1 :]).min(initial=np.inf)
        )
    return Table(states=table.states, least=least)


Stages = tuple[tuple[int, int, int], ...]
"""Start and stop by index in the space, and units, of one stage after the other."""


def path(needs: Needs, table: Table, replicas: Table | None = None) -> Stages:
    """Stages of least units in all, each as long as can be; with `replicas` one of them has two units or more."""
    stages = []
    here, last = 0, len(table.states) - 1
    while here < last:
        need, two = needs.block(table.states[here : here + 1], table.states[here + 1 :])
        units, target, beyond = need[0], table.least[here], table.least
        if replicas is not None:
            target, beyond = replicas.least[here], replicas.least
            if not (units + beyond[here + 1 :] == target).any():
                units, beyond, replicas = two[0], table.least, None
        step = int(np.flatnonzero(units + beyond[here + 1 :] == target)[-1])
        stages.append((int(table.states[here]), int(table.states[here + 1 + step]), int(units[step])))
        here += 1 + step
    return tuple(stages)


def straight_path(needs: Needs, table: Table, stages: int) -> Stages | None:
    """So many stages of one unit each, every one as long as can be; None if there are none."""
    last = len(table.states) - 1
    if stages > last:
        return None
    single = needs.block(table.states, table.states)[0] == 1.0
    reached = np.zeros((stages + 1, last + 1), dtype=bool)
    reached[0, last] = True
    for count in range(stages):
        reached[count + 1] = (single & reached[count]).any(axis=1)
    if not reached[stages, 0]:
        return None
    here, taken = 0, []
    for count in reversed(range(stages)):
        there = int(np.flatnonzero(single[here] & reached[count])[-1])
        taken.append((int(table.states[here]), int(table.states[there]), 1))
        here = there
    return tuple(taken)
