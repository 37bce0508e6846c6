"""Probe: PipeDream's recurrence at one bottleneck t: the fewest units of stages within t, from each state to the end.

The papers (2018, section 3.2; SOSP 2019, section 3.1) minimise the time on m units. The probe decides the inverse
question: is there a pipeline within t? The table A(j, m) then shrinks to one row of unit counts, for any m. The steps,
by the numbers of `space`:

    steps 1, 2   T(a..b, m) <= t     becomes   m >= need(a, b, t)
    step 3       a single stage      becomes   b = end, with R(end) = 0
    step 4       min over i and m'   becomes   R(a) = min over b of need(a, b, t) + R(b)
                 2 C_i <= t          becomes   the states that may be cut (`PartitionSpace.allowed`)

Some pipeline on at most m units is within t exactly if R(start) <= m. need has a closed form (`_loads`).
`least_with_replicas` and `straight_path` find pipelines on exactly m units.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.pipedream.space import ROUNDING, PartitionSpace

_BLOCK = 48
"""The number of states that one step of the loops handles together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitsNeeded:
    """The closed form of `need` at one bottleneck, for states by their index in the space.

    A unit works at the rate of all its `devices`, at best. If it is itself a network, `furthest` is the last state
    that one unit can reach from each state, and `known` holds the exact A^{k-1} found so far: by start a row of
    near stops, NaN where it was not requested.
    """

    space: PartitionSpace
    level: int
    bottleneck_s: float
    devices: int
    furthest: IntArray | None = None
    known: dict[int, FloatArray] = field(default_factory=dict)

    @property
    def monotone(self) -> bool:
        """Whether a stage inside another never needs more units: on a chain, if the units are devices."""
        return self.space.before is None and self.level == 0

    def least(self, rows: IntArray, columns: IntArray) -> FloatArray:
        """By row and column: the least units; infinite where there is no stage."""
        single, many = self._single_and_many(rows, columns)
        np.copyto(many, 1.0, where=single)
        return many

    def block(self, rows: IntArray, columns: IntArray) -> tuple[FloatArray, FloatArray]:
        """By row and column: the least units, and the least of two and more; infinite where there is no stage."""
        single, many = self._single_and_many(rows, columns)
        return np.where(single, 1.0, many), many

    def _single_and_many(self, rows: IntArray, columns: IntArray) -> tuple[BoolArray, FloatArray]:
        load, weights = self._loads(rows[:, None], columns)
        single = load <= 1
        if self.furthest is not None:
            single &= columns <= self.furthest[rows, None]
        if self.known:
            # known exact values replace the bounds
            first = int(columns[0])
            for i, row in enumerate(rows.tolist()):
                known = self.known.get(row)
                if known is not None and first < len(known):
                    near = int(np.searchsorted(columns, len(known)))
                    exact = known[columns[:near]] * ((1 - ROUNDING) / self.bottleneck_s)
                    there = ~np.isnan(exact)
                    np.copyto(load[i, :near], exact, where=there)
                    np.copyto(single[i, :near], exact <= 1, where=there)

        many = _least_of_many(load, weights)
        before = self.space.before
        if columns[0] <= rows[-1] or before is not None:
            none = columns <= rows[:, None] if before is None else ~before[rows].take(columns, axis=1)
            np.copyto(many, np.inf, where=none)
            np.copyto(single, False, where=none)
        return single, many

    def _loads(self, starts: IntArray, stops: IntArray) -> tuple[FloatArray, FloatArray | None]:
        """Compute, in bottlenecks of a unit; and z of the exchange, or None if z > 2 nowhere.

        T falls with m but for the step from 1 to 2, where the exchange begins: factor (m - 1)/m |w| / B <= t m solves
        to m >= z + sqrt(z (z - 2)) with z = (factor / 2) |w| / (B t); if z <= 2, any m >= 2 is enough.
        """
        space = self.space
        # step 2, its left term: A^{k-1} / t, at best
        load = space.compute_s[stops] - space.compute_s[starts]
        load *= (1 - ROUNDING) / (self.bottleneck_s * self.devices)
        # step 2, its right term: W_k(m) of step 1, solved for m by z
        bandwidth = space.levels[self.level].bandwidth_bytes_per_s
        scale = space.exchange / 2 * (1 - ROUNDING) / (bandwidth * self.bottleneck_s)
        heaviest = space.weight_bytes[stops].max(initial=0) - space.weight_bytes[starts].min(initial=np.inf)
        if heaviest * scale <= 2:
            return load, None
        weights = space.weight_bytes[stops] - space.weight_bytes[starts]
        weights *= scale
        return load, weights


def _least_of_many(load: FloatArray, weights: FloatArray | None) -> FloatArray:
    """The least units, at least two, for this work and exchange: max(load, z + sqrt(z (z - 2))), rounded up.

    Overwrites `load`.
    """
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
    """R at every state that may be cut (`least`), and where the first stage from there ends (`after`).

    R may be too large at a state that no pipeline on the given units passes. `replicated` is R of pipelines with a
    stage on two units or more; None where it was not needed.
    """

    states: IntArray
    least: FloatArray
    after: IntArray
    replicated: FloatArray | None = None


def least_units(needs: UnitsNeeded, states: IntArray, units: int) -> Table:
    """R of these states, from the start to the end."""
    if needs.monotone and 4 * units < len(states):
        return _least_by_count(needs, states, units)
    last = len(states) - 1
    least, after = np.full(last + 1, np.inf), np.full(last + 1, last)
    least[last] = 0.0
    before = units_before(needs, states)
    alive = np.array([last])
    for stop in range(last, 0, -_BLOCK):
        # step 4, for a block of first states: stages to the states after the block that are alive, then inside it
        start = max(stop - _BLOCK, 0)
        rows = states[start:stop]
        need = needs.least(rows, states[alive])
        need += least[alive]
        nearest = need.argmin(axis=1)
        after[start:stop] = alive[nearest]
        least[start:stop] = need[np.arange(len(rows)), nearest]
        need = needs.least(rows, rows)
        for i in range(len(rows) - 2, -1, -1):
            here = start + i
            inside = need[i, i + 1 :] + least[here + 1 : stop]
            nearest_inside = inside.argmin()
            if inside[nearest_inside] < least[here]:
                least[here] = inside[nearest_inside]
                after[here] = here + 1 + nearest_inside

            # a state is alive if the blocks before it leave enough units
        fresh = np.flatnonzero(least[start:stop] + before[start:stop] <= units) + start
        alive = np.concatenate((fresh, alive))
    return Table(states=states, least=least, after=after)


def _least_by_count(needs: UnitsNeeded, states: IntArray, units: int) -> Table:
    """R where a stage inside another never needs more units: how far back from the end p units reach, for p = 1, 2...

    The first stage has r of the p units. It reaches back from its end as far as its compute and its exchange allow.
    The other p - r units execute everything after its end. The best r gives the reach of p units.
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
    """Lower bound on the units of the blocks before each state, by their compute."""
    compute_s = needs.space.compute_s
    load = (compute_s[states] - compute_s[states[0]]) * ((1 - ROUNDING) / (needs.bottleneck_s * needs.devices))
    return np.asarray(np.ceil(load))


def least_with_replicas(needs: UnitsNeeded, table: Table) -> Table:
    """R of pipelines with a stage of two or more units, which can also use the spare units."""
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
"""One stage after the other: start and stop, by index in the space, and units."""


def path(table: Table, start: int = 0) -> Stages:
    """The stages on the fewest units in total, from a position on."""
    stages, here = [], start
    least, after = table.least.tolist(), table.after.tolist()
    states = table.states.tolist()
    while here < len(states) - 1:
        there = after[here]
        stages.append((states[here], states[there], int(least[here] - least[there])))
        here = there
    return tuple(stages)


def path_with_replicas(needs: UnitsNeeded, table: Table, replicas: Table) -> Stages:
    """The same, with at least one stage of two units or more."""
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
    """`stages` one-unit stages, each as long as possible; None if there are none."""
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
