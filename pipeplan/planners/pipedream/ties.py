"""Ties: the rule that chooses among all stages with the least bottleneck.

The rule: fewer stages; then fewer bytes sent (each boundary both ways, and every stage's exchange of gradients); then
the smaller first cut, then the smaller second, and so on; then fewer units on the earlier stages. On at most all units,
fewer units come first of all. If the table of bytes would have more than `TABLE_ENTRIES` entries, bytes are not
compared: the stages then take the fewest units, and the first with more than one takes the spare units.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.planners.pipedream.probe import Stages, UnitsNeeded, least_units, units_before
from pipeplan.planners.pipedream.recurrence import NOTHING, LevelSearch
from pipeplan.planners.pipedream.space import ROUNDING

TABLE_ENTRIES = 4_000_000
"""Entries of the table of bytes: a few hundredths of a second."""

_ROWS = 48
"""States whose edges are found together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """The stages within a bottleneck on some path, by position among `states`, sorted by start, then stop.

    `need` is the fewest units, `two` the fewest of two and more.
    """

    states: IntArray
    start: IntArray
    stop: IntArray
    need: IntArray
    two: IntArray

    def __len__(self) -> int:
        return len(self.start)

    def least_by_start(self, values: FloatArray) -> FloatArray:
        """The least value of the edges that start at each state; the edges are the first axis."""
        least = np.full((len(self.states), *values.shape[1:]), np.inf)
        starts, first = self._starts
        if len(starts):
            least[starts] = np.minimum.reduceat(values, first, axis=0)
        return least

    @cached_property
    def _starts(self) -> tuple[IntArray, IntArray]:
        """The states at which edges start, and the first edge of each."""
        starts, first = np.unique(self.start, return_index=True)
        return starts, first


def preferred(level: LevelSearch, start: int, stop: int) -> Stages:
    """The stages of the optimum from one state to another that the rule prefers."""
    everything = (start, stop, level.units)
    whole_s = level.stage_s(*everything)
    evenly_s = float(level.space.compute_s[stop] - level.space.compute_s[start]) / (level.units * level.devices)
    if not level.fewer and whole_s <= evenly_s * (1 + 2 * ROUNDING):
        return (everything,)  # no stages are faster than evenly shared compute
    cost_s = level.optimum_s(start, stop)
    limit_s = cost_s * (1 + 2 * ROUNDING)
    if not level.fewer and whole_s <= limit_s:
        return (everything,)
    within_s = cost_s or whole_s * NOTHING
    states = level.states(level.space.within(start, stop), within_s)
    needs = level.needs(within_s, start, stop)
    while True:
        # by the bounds known so far; if a stage turns out slower, its time is known in the next round
        units = int(least_units(needs, states, level.units).least[0]) if level.fewer else level.units
        edges = edges_on_a_way(needs, states, units)
        layers, replicated = _layers(edges, units, exactly=not level.fewer)
        left = units - int(layers[-1][0])
        if len(layers) * len(edges) * (left + 1) ** 2 > TABLE_ENTRIES:
            over = left > 0 and not level.fewer
            stages = level.spread(tuple(_fewest_units(edges, layers, replicated if over else None)))
        else:
            stages = tuple(_least_sent(level, edges, layers, left))
        if all(level.stage_s(*stage) <= max(limit_s, within_s) for stage in stages):
            return stages


def edges_on_a_way(needs: UnitsNeeded, states: IntArray, units: int) -> Edges:
    """The stages that are part of a path from start to end on at most `units` units."""
    downstream = least_units(needs, states, units).least
    available = units - units_before(needs, states)
    parts = []
    for first in range(0, len(states) - 1, _ROWS):
        end = min(first + _ROWS, len(states) - 1)
        table, several = needs.block(states[first:end], states[first + 1 :])
        rows, columns = np.nonzero(table + downstream[first + 1 :] <= available[first:end, None])
        parts.append((rows + first, columns + first + 1, table[rows, columns], several[rows, columns]))
    start, stop, need, two = (np.concatenate(columns) for columns in zip(*parts, strict=True))

    # the least units of the stages from the first state to each
    by_stop = np.argsort(stop, kind="stable")
    sources, needed = start[by_stop], need[by_stop]
    ends = np.searchsorted(stop[by_stop], np.arange(len(states) + 1))
    ahead = np.full(len(states), np.inf)
    ahead[0] = 0.0
    for state in np.unique(stop).tolist():
        edges = slice(ends[state], ends[state + 1])
        ahead[state] = (ahead[sources[edges]] + needed[edges]).min()

    kept = ahead[start] + need + downstream[stop] <= units
    return Edges(
        states=states,
        start=start[kept],
        stop=stop[kept],
        need=need[kept].astype(np.int64),
        two=np.minimum(two[kept], units + 1).astype(np.int64),
    )


def _layers(edges: Edges, units: int, *, exactly: bool) -> tuple[list[FloatArray], list[FloatArray]]:
    """The fewest units from each state to the end in 0, 1, 2... stages, up to the fewest stages that are enough.

    The second list is the same with at least one stage of two units or more, which can take the spare units.
    """
    last = len(edges.states) - 1
    least = np.full(last + 1, np.inf)
    least[last] = 0.0
    layers, replicated = [least], [np.full(last + 1, np.inf)]
    for stages in count(1):
        with_more = np.minimum(edges.need + replicated[-1][edges.stop], edges.two + layers[-1][edges.stop])
        replicated.append(edges.least_by_start(with_more))
        layers.append(edges.least_by_start(edges.need + layers[-1][edges.stop]))
        fewest = layers[-1][0]
        if replicated[-1][0] <= units or fewest == units or (not exactly and fewest <= units) or stages > last:
            break
    return layers, replicated


def _fewest_units(
    edges: Edges, layers: list[FloatArray], replicated: list[FloatArray] | None
) -> Iterator[tuple[int, int, int]]:
    """The fewest stages on the fewest units, the smallest cuts first; with `replicated`, one has two units or more."""
    here = 0
    for downstream in reversed(range(len(layers) - 1)):
        row = slice(*np.searchsorted(edges.start, (here, here + 1)))
        stops, units = edges.stop[row], edges.need[row]
        total = units + layers[downstream][stops]
        if replicated is not None:
            total, several = units + replicated[downstream][stops], edges.two[row] + layers[downstream][stops]
            if several.min() <= total.min():
                total, units, replicated = several, edges.two[row], None
        edge = int(np.argmin(total))
        yield _stage(edges, row.start + edge, int(units[edge]))
        here = int(stops[edge])


def _least_sent(
    level: LevelSearch, edges: Edges, layers: list[FloatArray], left: int
) -> Iterator[tuple[int, int, int]]:
    """The fewest stages that send the least, by dynamic programming over stages, states and units above the least."""
    table = np.where(np.arange(left + 1) == 0, np.where(np.isfinite(layers[0]), 0.0, np.inf)[:, None], np.inf)
    takes = [_Taking.above_need(level, edges, extra) for extra in range(left + 1)]
    sent = list[tuple[IntArray, FloatArray]]()
    for stages in range(1, len(layers)):
        # In a long chain few edges begin a path of this many stages.
        first = np.isfinite(layers[stages])[edges.start] & np.isfinite(layers[stages - 1])[edges.stop]
        some = np.flatnonzero(first)
        sent.append((some, np.stack([taking.some(some).sent(layers, table, stages) for taking in takes])))
        table = np.full_like(table, np.inf)
        np.minimum.at(table, edges.start[some], sent[-1][1].min(axis=0))
    # read off from the front
    here, over = 0, left
    for stages in reversed(range(1, len(layers))):
        some, choices = sent[stages - 1]
        row = np.flatnonzero(edges.start[some] == here)
        # of the optimal edges from here, the smallest cut, then the fewest units
        from_here = choices[:, row, over]
        enough = from_here.min() * (1 + ROUNDING)
        place, extra = (int(found[0]) for found in np.nonzero((from_here <= enough).T))
        edge = int(some[row[place]])
        units = int(edges.need[edge]) + extra
        over += int(layers[stages][here]) - units - int(layers[stages - 1][edges.stop[edge]])
        yield _stage(edges, edge, units)
        here = int(edges.stop[edge])


@dataclass(frozen=True, slots=True, eq=False)
class _Taking:
    """By edge, a stage that takes some units above its need: the units, whether it may, and the bytes that it sends.

    Of a stage: its exchange, a worker's share a minibatch, and the boundary after it both ways.
    """

    start: IntArray
    stop: IntArray
    units: IntArray
    able: BoolArray
    own: FloatArray

    @classmethod
    def above_need(cls, level: LevelSearch, edges: Edges, extra: int) -> "_Taking":
        """`extra` units above the need."""
        units, space, stop = edges.need + extra, level.space, edges.states[edges.stop]
        weight_bytes = space.weight_bytes[stop] - space.weight_bytes[edges.states[edges.start]]
        downstream = np.where(edges.stop < len(edges.states) - 1, 2.0 * space.boundary_bytes[stop], 0.0)
        own = space.exchange * (units - 1) / units * weight_bytes + downstream
        able = np.full(len(units), True) if extra == 0 else units >= edges.two
        return cls(edges.start, edges.stop, units, able, own)

    def some(self, edges: IntArray) -> "_Taking":
        """Some of the edges, by number."""
        return _Taking(self.start[edges], self.stop[edges], self.units[edges], self.able[edges], self.own[edges])

    def sent(self, layers: list[FloatArray], table: FloatArray, stages: int) -> FloatArray:
        """Bytes by edge and by units above the minimum, if the first of `stages` stages takes these units.

        From each of the edges a path of `stages` stages leads to the end.
        """
        shift = (layers[stages][self.start] - self.units - layers[stages - 1][self.stop]).astype(np.int64)
        over = np.arange(table.shape[1]) + shift[:, None]
        inside = (over >= 0) & (over < table.shape[1]) & self.able[:, None]
        sent = table[self.stop[:, None], np.clip(over, 0, table.shape[1] - 1)] + self.own[:, None]
        return np.where(inside, sent, np.inf)


def _stage(edges: Edges, edge: int, units: int) -> tuple[int, int, int]:
    return int(edges.states[edges.start[edge]]), int(edges.states[edges.stop[edge]]), units
