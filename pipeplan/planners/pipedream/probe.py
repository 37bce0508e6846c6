"""Probe: the least units that stages within a bottleneck t need, from every state to the end.

    R(a) = min over b of need(a, b, t) + R(b)        R(end) = 0

need(a, b, t) is the least m with T(a..b, m) <= t, in closed form: T falls with m but for the step from 1 to 2, where
the exchange begins. m (m - 1) |w| / (m B) <= t m solves to m = z + sqrt(z (z - 2)), z = (factor / 2) |w| / (B t), and
any m >= 2 will do where z <= 2. So t is tested whatever the number of units is.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.pipedream.space import ROUNDING, PartitionSpace

_BLOCK = 48
"""States that are worked on at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitsNeeded:
    """The closed form of `need` at one bottleneck, for states by their index in the space.

    A unit does work at the rate of its `devices`. `furthest` bounds what one unit can do behind each state where it
    is itself a network; `known` holds what was found of A^{k-1} exactly: by start a row of the stops that are near,
    NaN where it was not asked for.
    """

    space: PartitionSpace
    level: int
    bottleneck_s: float
    devices: int
    furthest: IntArray | None = None
    known: dict[int, FloatArray] = field(default_factory=dict)

    @property
    def monotone(self) -> bool:
        """Whether a stage that lies inside another never needs more: on a chain, of devices."""
        return self.space.before is None and self.level == 0

    def least(self, rows: IntArray, columns: IntArray) -> FloatArray:
        """By row and column: the least units; infinite where no stage is."""
        single, many = self._single_and_many(rows, columns)
        np.copyto(many, 1.0, where=single)
        return many

    def block(self, rows: IntArray, columns: IntArray) -> tuple[FloatArray, FloatArray]:
        """By row and column: the least units, and the least of two and more; infinite where no stage is."""
        single, many = self._single_and_many(rows, columns)
        return np.where(single, 1.0, many), many

    def _single_and_many(self, rows: IntArray, columns: IntArray) -> tuple[BoolArray, FloatArray]:
        load, weights = self._loads(rows[:, None], columns)
        single = load <= 1
        if self.furthest is not None:
            single &= columns <= self.furthest[rows, None]
        if self.known:
            self._set_known(load, single, rows, columns)
        many = _least_of_many(load, weights)
        if columns[0] <= rows[-1] or self.space.before is not None:
            none = self._no_stages(rows, columns)
            np.copyto(many, np.inf, where=none)
            np.copyto(single, False, where=none)
        return single, many

    def pairs(self, starts: IntArray, stops: IntArray) -> FloatArray:
        """The least units from each start to its stop, as far as the closed form knows."""
        load, weights = self._loads(starts, stops)
        return np.where(load <= 1, 1.0, _least_of_many(load, weights))

    def _loads(self, starts: IntArray, stops: IntArray) -> tuple[FloatArray, FloatArray | None]:
        """Compute in bottlenecks of a unit; and z of the exchange, where it matters to any."""
        space = self.space
        load = space.compute_s[stops] - space.compute_s[starts]
        load *= (1 - ROUNDING) / (self.bottleneck_s * self.devices)
        bandwidth = space.levels[self.level].bandwidth_bytes_per_s
        scale = space.exchange / 2 * (1 - ROUNDING) / (bandwidth * self.bottleneck_s)
        heaviest = space.weight_bytes[stops].max(initial=0) - space.weight_bytes[starts].min(initial=np.inf)
        if heaviest * scale <= 2:
            return load, None
        weights = space.weight_bytes[stops] - space.weight_bytes[starts]
        weights *= scale
        return load, weights

    def _no_stages(self, rows: IntArray, columns: IntArray) -> BoolArray:
        if self.space.before is None:
            return np.asarray(columns <= rows[:, None])
        return ~self.space.before[rows].take(columns, axis=1)

    def _set_known(self, load: FloatArray, single: BoolArray, rows: IntArray, columns: IntArray) -> None:
        """What is known exactly replaces the bounds."""
        first = int(columns[0])
        for i, row in enumerate(rows.tolist()):
            known = self.known.get(row)
            if known is not None and first < len(known):
                near = int(np.searchsorted(columns, len(known)))
                exact = known[columns[:near]] * ((1 - ROUNDING) / self.bottleneck_s)
                there = ~np.isnan(exact)
                np.copyto(load[i, :near], exact, where=there)
                np.copyto(single[i, :near], exact <= 1, where=there)


def _least_of_many(load: FloatArray, weights: FloatArray | None) -> FloatArray:
    """The least of two and more units that do so much work, and exchange so many weights; changes its arguments."""
    if weights is not None:
        root = weights - 2
        root *= weights
        np.maximum(root, 0, out=root)
        np.sqrt(root, out=root)
        root += weights
        np.maximum(load, root, out=load)
    np.ceil(load, out=load)
    return np.maximum(load, 2.0, out=load)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """R by position among the states that may be cut, and the position to which the first stage then goes.

    R is too large where more than there is would be needed in all. `replicated`, where it mattered: the same with at
    least one stage of two units or more.
    """

    states: IntArray
    least: FloatArray
    after: IntArray
    replicated: FloatArray | None = None


def least_units(needs: UnitsNeeded, states: IntArray, units: int) -> Table:
    """R for the states, whose first is the start and last the end."""
    if needs.monotone and 4 * units < len(states):
        return _least_by_count(needs, states, units)
    last = len(states) - 1
    table = Table(states=states, least=np.full(last + 1, np.inf), after=np.full(last + 1, last))
    least = table.least
    least[last] = 0.0
    before = units_before(needs, states)
    alive = np.array([last])
    for stop in range(last, 0, -_BLOCK):
        start = max(stop - _BLOCK, 0)
        _relax(needs, table, slice(start, stop), alive)
        fresh = np.flatnonzero(least[start:stop] + before[start:stop] <= units) + start
        alive = np.concatenate((fresh, alive))
    return table


def _least_by_count(needs: UnitsNeeded, states: IntArray, units: int) -> Table:
    """R where longer stages never need less: how far back p units reach from the end, for p = 1, 2..

    A stage of r units reaches as far as its compute and its exchange allow, wherever it ends.
    """
    space, within_s = needs.space, needs.bottleneck_s * (1 + ROUNDING)
    compute_s, weight_bytes = space.compute_s[states], space.weight_bytes[states]
    counts = np.arange(1.0, units + 1)
    work_s = within_s * counts
    with np.errstate(divide="ignore"):
        exchanged = work_s / space.exchange_s(needs.level, 1.0, counts)
    reached = [len(states) - 1]
    least = np.full(len(states), units + 1.0)
    least[-1] = 0.0
    after = np.full(len(states), len(states) - 1)
    while reached[-1] > 0 and len(reached) <= units:
        stops = np.asarray(reached[::-1])
        by_compute = np.searchsorted(compute_s, compute_s[stops] - work_s[: len(stops)])
        by_weight = np.searchsorted(weight_bytes, weight_bytes[stops] - exchanged[: len(stops)])
        back = np.maximum(by_compute, by_weight)
        furthest = int(np.argmin(back))
        first = min(int(back[furthest]), reached[-1])
        least[first : reached[-1]] = len(reached)
        after[first : reached[-1]] = stops[furthest]
        reached.append(first)
    return Table(states=states, least=least, after=after)


def units_before(needs: UnitsNeeded, states: IntArray) -> FloatArray:
    """What the blocks before each state need at least."""
    compute_s = needs.space.compute_s
    load = (compute_s[states] - compute_s[states[0]]) * ((1 - ROUNDING) / (needs.bottleneck_s * needs.devices))
    return np.asarray(np.ceil(load))


def _relax(needs: UnitsNeeded, table: Table, block: slice, alive: IntArray) -> None:
    """R of a block of states, from the states behind it that are alive, then from one another."""
    rows, least = table.states[block], table.least
    need = needs.least(rows, table.states[alive])
    need += least[alive]
    nearest = need.argmin(axis=1)
    table.after[block] = alive[nearest]
    least[block] = need[np.arange(len(rows)), nearest]
    need = needs.least(rows, rows)
    for i in range(len(rows) - 2, -1, -1):
        here = block.start + i
        inside = need[i, i + 1 :] + least[here + 1 : block.stop]
        nearest_inside = inside.argmin()
        if inside[nearest_inside] < least[here]:
            least[here] = inside[nearest_inside]
            table.after[here] = here + 1 + nearest_inside


def least_with_replicas(needs: UnitsNeeded, table: Table) -> Table:
    """The least units with at least one stage of two or more: what is left over can then go to it."""
    states, least, last = table.states, table.least, len(table.states) - 1
    replicated = np.full_like(least, np.inf)
    for stop in range(last, 0, -_BLOCK):
        start = max(stop - _BLOCK, 0)
        rows = states[start:stop]
        need, two = needs.block(rows, states[start + 1 :])
        need[:, stop - start - 1 :] += replicated[stop:]
        two += least[start + 1 :]
        best = np.minimum(two.min(axis=1), need[:, stop - start - 1 :].min(axis=1))
        for i in reversed(range(stop - start)):
            inside = need[i, i : stop - start - 1] + replicated[start + i + 1 : stop]
            replicated[start + i] = min(best[i], inside.min(initial=np.inf))
    return replace(table, least=replicated)


Stages = tuple[tuple[int, int, int], ...]
"""Start and stop by index in the space, and units, of one stage after the other."""


def path(table: Table, start: int = 0) -> Stages:
    """Stages of least units in all, from a position on."""
    stages, here = [], start
    least, after = table.least.tolist(), table.after.tolist()
    states = table.states.tolist()
    while here < len(states) - 1:
        there = after[here]
        stages.append((states[here], states[there], int(least[here] - least[there])))
        here = there
    return tuple(stages)


def path_with_replicas(needs: UnitsNeeded, table: Table, replicas: Table) -> Stages:
    """The same, one of them with two units or more."""
    stages = list[tuple[int, int, int]]()
    here = 0
    while True:
        need, two = needs.block(table.states[here : here + 1], table.states[here + 1 :])
        single, several = need[0] + replicas.least[here + 1 :], two[0] + table.least[here + 1 :]
        total, units = (single, need[0]) if single.min() < several.min() else (several, two[0])
        step = int(total.argmin())
        stages.append((int(table.states[here]), int(table.states[here + 1 + step]), int(units[step])))
        here += 1 + step
        if total is several:
            break
    return (*stages, *path(table, here))


def straight_path(needs: UnitsNeeded, table: Table, stages: int) -> Stages | None:
    """So many stages of one unit each, every one as long as can be; None if there are none."""
    last = len(table.states) - 1
    if stages > last:
        return None
    single = needs.least(table.states, table.states) == 1.0
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
