"""Graph bound: a lower bound on the time of a graph's plans, without listing the graph's cuts.

Cuts are grouped into windows by the compute before them. A window [low, high] stands for all cuts I with
low <= c(I) <= high. All of them satisfy:

    inside     every block b with c(all) - c(b and what depends on it) < low: without b none of those would be in I
    outside    every block b with c(b and what it depends on) > high
    weights    at least those of the blocks inside, and the least weights of other blocks that add up to `low` compute
               (blocks by their weights a second, the last one in part); the upper bound mirrors this from the end
    boundary   at least the fewest bytes that cross any cut with these blocks inside and outside (`least_crossing`), of
               this window or of one around it

Every plan maps to a path over the windows of its cuts, without the stages that begin and end in the same window. So
within a bottleneck t, no plan needs fewer devices than the path that needs the fewest (`least_units`). If there are
fewer, no plan is within t. The path is that of `probe`: PipeDream's recurrence at one bottleneck, with bounds in place
of the terms.

The same holds on several levels of network if all links count as fast as the fastest: a stage on n devices takes at
least compute / n, and its slowest exchange at least (n - 1)/n |w| factor / (n B). And it holds for the units of an
outer level, each as fast as all its devices together, joined by the fastest links from that level on.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray, IntArray
from pipeplan.costs.graph import Graph, closures, membership
from pipeplan.planners.pipedream.least_crossing import least_crossing
from pipeplan.planners.pipedream.states import grid_s

WINDOWS = 500
"""The number of equal windows. More windows tighten the bound."""

PLACES_AT_MOST = 500
"""Upper bound on the windows for known cuts."""

BLOCKS_AT_MOST = 4000
"""Upper bound on the blocks of a dependency table; beyond, only compute bounds a plan."""

ROUNDING = 1e-12
"""Sums in different orders differ by less."""

PRECISION = 1e-4
"""The relative gap between the bound and the least time that it cannot refute."""

FLOWS_AT_MOST = 250
"""Searches for the fewest bytes across a range of windows: about a millisecond each for a thousand blocks."""

_ROWS = 500
"""Sets that are summed at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """By window, ascending; the first is the start and the last the end of the model.

    `cheap` are cuts of few bytes for their place, found during the search.
    """

    low_s: FloatArray
    high_s: FloatArray
    least_weight_bytes: FloatArray
    most_weight_bytes: FloatArray
    least_activation_bytes: FloatArray
    most_activation_bytes: FloatArray
    boundary_bytes: FloatArray
    cheap: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """A graph in topological order, with its blocks' costs and outputs.

    Seconds are on a grid (`grid_s`), which makes sums exact in any order.
    """

    graph: Graph
    compute_s: FloatArray
    weight_bytes: FloatArray
    activation_bytes: FloatArray
    output_bytes: FloatArray


def windows_of(blocks: Blocks, sides: "Sides", limit_bytes: float, places_s: FloatArray) -> Windows:
    """The windows of a graph. For a boundary above the limit, the bytes are not computed.

    `places_s`: the compute before known cuts, each of which gets a window of its own.
    """
    total_s = float(blocks.compute_s.sum())
    # equal windows, and one for each place; compute is a multiple of a unit, so windows need not overlap
    unit_s = grid_s(total_s)
    some = places_s[np.unique(np.linspace(0, len(places_s) - 1, PLACES_AT_MOST).astype(int))] if len(places_s) else []
    even = np.rint(np.linspace(0.0, total_s, WINDOWS + 1) / unit_s) * unit_s
    edges = np.unique(np.concatenate((even, some, np.add(some, unit_s), [total_s + unit_s])))
    low_s, high_s = edges[:-1], edges[1:] - unit_s

    certain = sides.certain(low_s, high_s)
    weights = _range(blocks.weight_bytes, certain, low_s, high_s, blocks.compute_s)
    activations = _range(blocks.activation_bytes, certain, low_s, high_s, blocks.compute_s)
    boundary_bytes, cheap = _boundaries(blocks, sides, low_s, high_s, limit_bytes)
    return Windows(
        low_s=np.concatenate(([0.0], low_s, [total_s])),
        high_s=np.concatenate(([0.0], high_s, [total_s])),
        least_weight_bytes=weights[0],
        most_weight_bytes=weights[1],
        least_activation_bytes=activations[0],
        most_activation_bytes=activations[1],
        boundary_bytes=np.concatenate(([0.0], boundary_bytes, [0.0])),
        cheap=cheap,
    )


class Sides:
    """Which blocks are certainly before or after a cut, by the compute before it."""

    def __init__(self, blocks: Blocks) -> None:
        graph = blocks.graph
        self._total_s = float(blocks.compute_s.sum())
        parts = range(0, len(graph), _ROWS)
        self._needed_s, self._dependent_s = (
            np.concatenate([membership(sets[i : i + _ROWS], len(graph)) @ blocks.compute_s for i in parts])
            for sets in closures(graph)
        )
        self._sources = [block for block, reads in enumerate(graph.reads) if not reads]
        self._sinks = [block for block, readers in enumerate(graph.read_by) if not readers]

    def certain(self, low_s: FloatArray, high_s: FloatArray) -> tuple[BoolArray, BoolArray]:
        """By window and block: before, and after. Every cut has a block before it, and one after it."""
        inside = (self._total_s - self._dependent_s) < low_s[:, None]
        outside = self._needed_s > high_s[:, None]
        if len(self._sources) == 1 and len(self._sinks) == 1 and self._sources != self._sinks:
            inside[:, self._sources], inside[:, self._sinks] = True, False
            outside[:, self._sinks], outside[:, self._sources] = True, False
        return inside, outside


def _boundaries(
    blocks: Blocks, sides: Sides, low_s: FloatArray, high_s: FloatArray, limit_bytes: float
) -> tuple[FloatArray, tuple[int, ...]]:
    """By window, the fewest bytes; and cuts within the limit. Ranges of windows within the limit are halved."""
    outputs = [int(size) for size in blocks.output_bytes]
    found = np.zeros(len(low_s))
    cheap: dict[int, None] = {}
    ranges = deque([(0, len(found))])
    for _ in range(FLOWS_AT_MOST):
        if not ranges:
            break
        start, stop = ranges.popleft()
        inside, outside = sides.certain(low_s[start : start + 1], high_s[stop - 1 : stop])
        least = least_crossing(blocks.graph, outputs, inside[0].tolist(), outside[0].tolist(), limit_bytes)
        found[start:stop] = np.maximum(found[start:stop], least.size_bytes)
        if least.before is not None:
            cheap[least.before] = None
            middle = (start + stop) // 2
            ranges.extend(part for part in ((start, middle), (middle, stop)) if start < middle)
    return found, tuple(cheap)


def _range(
    sizes: FloatArray,
    certain: tuple[BoolArray, BoolArray],
    low_s: FloatArray,
    high_s: FloatArray,
    compute_s: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """By window, start and end included: lower and upper bound on the bytes of the blocks before its cuts."""
    inside, outside = certain
    total_bytes, total_s = sizes.sum(), compute_s.sum()
    least = _least(sizes, inside, inside | outside, low_s, compute_s)
    left_out = _least(sizes, outside, inside | outside, total_s - high_s, compute_s)
    most = total_bytes - left_out
    return np.concatenate(([0.0], least, [total_bytes])), np.concatenate(([0.0], most, [total_bytes]))


def _least(
    sizes: FloatArray, certain: BoolArray, known: BoolArray, needed_s: FloatArray, compute_s: FloatArray
) -> FloatArray:
    """By row: the bytes of the certain blocks, and the least bytes of unknown blocks that add up to the compute needed.

    Blocks are taken by their bytes a second, the last one in part.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        density = np.where(compute_s > 0, sizes / compute_s, np.inf)
    by_density = np.argsort(density, kind="stable")
    unknown = ~known[:, by_density]
    seconds = np.cumsum(np.where(unknown, compute_s[by_density], 0.0), axis=1)
    held = np.cumsum(np.where(unknown, sizes[by_density], 0.0), axis=1)
    missing_s = needed_s - certain @ compute_s - compute_s.sum() * ROUNDING
    whole = (seconds <= missing_s[:, None]).sum(axis=1)
    rows, before = np.arange(len(certain)), np.maximum(whole - 1, 0)
    taken_s = np.where(whole > 0, seconds[rows, before], 0.0)
    taken_bytes = np.where(whole > 0, held[rows, before], 0.0)
    last = np.minimum(whole, len(compute_s) - 1)
    part_s = np.where((whole < len(compute_s)) & (missing_s > taken_s), missing_s - taken_s, 0.0)
    rate = np.where(np.isfinite(density[by_density][last]), density[by_density][last], 0.0)
    return np.asarray(certain @ sizes + taken_bytes + part_s * rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Lower bound on a stage's bytes, linear in its minibatches in flight: fixed + in flight x each.

    Both are by byte of weights, then by byte of activations.
    """

    fixed: tuple[float, float]
    each: tuple[float, float]
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """`units` units of `inside` devices each, joined by links of one speed.

    `exchange` is the factor of (m - 1)/m |w| / B for an update. `straight`: one unit a stage. `held` is set if a unit
    is a device, and memory counts.
    """

    units: int
    bandwidth_bytes_per_s: float
    exchange: float
    inside: int = 1
    straight: bool = False
    held: HeldBytes | None = None

    @property
    def devices(self) -> int:
        """The total number of devices."""
        return self.units * self.inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No plan is below these seconds: within `refuted_s`, a plan needs `needed` units, and there are fewer.

    Both are 0 for the bound that always holds: all devices sharing all compute.
    """

    seconds: float
    refuted_s: float = 0.0
    needed: float = 0.0
    units: int = 0


def compute_bound(blocks: Blocks, devices: int, upper_s: float) -> Bound:
    """The seconds of all devices sharing all compute; at most `upper_s`, the time of some plan."""
    return Bound(seconds=min(float(blocks.compute_s.sum()) / devices, upper_s))


def bound(windows: Windows, machines: Machines, upper_s: float) -> Bound:
    """A lower bound on the time of all plans, by bisection; at most `upper_s`, the time of some plan."""
    low_s, high_s = min(float(windows.low_s[-1]) / machines.devices, upper_s), upper_s
    best = Bound(seconds=low_s)
    while high_s > low_s * (1 + PRECISION):
        middle_s = (low_s * high_s) ** 0.5
        needed = least_units(windows, machines, middle_s)
        if needed > machines.units:
            low_s = middle_s
            best = Bound(seconds=middle_s, refuted_s=middle_s, needed=needed, units=machines.units)
        else:
            high_s = middle_s
    return best


def least_units(windows: Windows, machines: Machines, bottleneck_s: float) -> float:
    """The fewest units on a path from start to end whose stages and boundaries are within the bottleneck."""
    limit_bytes = bottleneck_s * machines.bandwidth_bytes_per_s / 2 * (1 + ROUNDING)
    allowed = windows.boundary_bytes <= limit_bytes
    allowed[[0, -1]] = True
    kept = np.flatnonzero(allowed)
    units = np.full(len(kept), np.inf)
    units[-1] = 0.0
    bandwidth, inside = machines.bandwidth_bytes_per_s, machines.inside
    for row in reversed(range(len(kept) - 1)):
        start, stops = int(kept[row]), kept[row + 1 :]
        # A stage from window g to h computes at least low(h) - high(g), and has at least the least weights of h less
        # the most of g. It needs the least m >= 1 with compute / m <= t and, for m >= 2, exchange (m - 1)/m^2 |w| / B
        # <= t.
        load = (windows.low_s[stops] - windows.high_s[start]) * ((1 - ROUNDING) / (bottleneck_s * inside))
        several: FloatArray | float = np.inf
        if not machines.straight:
            weight_bytes = windows.least_weight_bytes[stops] - windows.most_weight_bytes[start]
            half = weight_bytes * (machines.exchange / 2 * (1 - ROUNDING) / (bandwidth * bottleneck_s))
            many = np.maximum(load, half + np.sqrt(np.maximum(half * (half - 2), 0.0)))
            several = np.maximum(np.ceil(many), 2.0)
        stages = np.where(load <= 1, 1.0, several)
        units[row] = (_fitting(windows, kept, row, stages, units[row + 1 :], machines) + units[row + 1 :]).min()
    return float(units[0])


def _fitting(
    windows: Windows, kept: IntArray, row: int, stages: FloatArray, downstream: FloatArray, machines: Machines
) -> FloatArray:
    """The least m >= `stages` with which weights and activations of ceil((m + downstream) / m) minibatches fit."""
    held = machines.held
    if held is None:
        return stages
    start, stops = int(kept[row]), kept[row + 1 :]
    weights = np.maximum(windows.least_weight_bytes[stops] - windows.most_weight_bytes[start], 0.0)
    activations = np.maximum(windows.least_activation_bytes[stops] - windows.most_activation_bytes[start], 0.0)
    fixed = held.fixed[0] * weights + held.fixed[1] * activations
    each = held.each[0] * weights + held.each[1] * activations
    left = held.limit_bytes * (1 + ROUNDING) - fixed
    with np.errstate(divide="ignore", invalid="ignore"):
        in_flight = np.where(each > 0, np.floor(left / each * (1 + ROUNDING)), np.where(left >= 0, np.inf, 0.0))
        enough = np.where(downstream == 0, 1.0, np.ceil(downstream / (in_flight - 1) * (1 - ROUNDING)))
    possible = (in_flight >= 1) & ((downstream == 0) | (in_flight >= 2)) & np.isfinite(downstream)
    if machines.straight:
        possible &= enough <= 1
    return np.where(possible, np.maximum(stages, enough), np.inf)
