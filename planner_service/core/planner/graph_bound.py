"""Graph bound: a time below which no plan of a graph is, without listing the graph's cuts.

Cuts are put into windows by how much compute they have before them. A window [low, high] stands for all cuts I with
low <= c(I) <= high, and what holds for all of them is:

    inside     every block b with c(all) - c(b and what depends on it) < low: without b none of those would be in I
    outside    every block b with c(b and what it depends on) > high
    weights    at least those of the blocks inside, and the least that compute up to `low` can be had for among the
               others (blocks by their weights a second, the last one in part); at most all but the same of the rest
    boundary   at least the fewest bytes that cross any cut with these blocks inside and outside (`least_crossing`), of
               this window or of one around it

Every plan maps to a path over windows, by the windows of its cuts, leaving out the stages that begin and end in the
same one. A stage from window g to window h computes at least low(h) - high(g) and has at least the least weights of h
less the most of g; it crosses at least h's least boundary. So the least number of devices over all such paths within a
bottleneck t is at most that of any plan within t: where it exceeds the devices that are there, no plan is within t.
That holds on several levels of network too, if all of it is as fast as the fastest: a stage on n devices takes at
least compute / n, and its slowest exchange at least (n - 1)/n |w| factor / (n B). Memory is not looked at.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.core.cost.compute import BoolArray, FloatArray
from planner_service.core.graph import Graph, closures, membership
from planner_service.core.least_crossing import least_crossing
from planner_service.core.planner.graph_states import grid_s

WINDOWS = 500
"""Equal windows. The finer, the nearer the bound."""

PLACES_AT_MOST = 500
"""Windows of cuts that are known."""

BLOCKS_AT_MOST = 4000
"""What depends on what is a table; beyond, the bound is compute alone."""

ROUNDING = 1e-12
"""Sums in different orders differ by less."""

PRECISION = 1e-4
"""How near to the least time that it cannot refute the bound comes."""

FLOWS_AT_MOST = 500
"""Searches for the fewest bytes that cross a range of windows: about a millisecond each for a thousand blocks."""

_ROWS = 500
"""Sets that are looked at at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """By window, ascending, the first being the start and the last the end of the model.

    `cheap` are cuts that were found on the way, of few bytes for where they are.
    """

    low_s: FloatArray
    high_s: FloatArray
    least_weight_bytes: FloatArray
    most_weight_bytes: FloatArray
    boundary_bytes: FloatArray
    cheap: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """A graph whose blocks stand behind what they read, with what they take and put out.

    Seconds are on a grid (`grid_s`), so that sums are exact in any order.
    """

    graph: Graph
    compute_s: FloatArray
    weight_bytes: FloatArray
    output_bytes: FloatArray


def windows_of(blocks: Blocks, sides: "Sides", limit_bytes: float, places_s: FloatArray) -> Windows:
    """The windows of a graph. Boundaries of more bytes than the limit are only known to be that.

    `places_s`: amounts of compute at which a cut is known, and gets a window of its own.
    """
    compute_s, weight_bytes = blocks.compute_s, blocks.weight_bytes
    total_s = float(compute_s.sum())
    low_s, high_s = _edges(total_s, places_s)
    inside, outside = sides.certain(low_s, high_s)
    least = _least_weights(inside, inside | outside, low_s, blocks)
    left_out = _least_weights(outside, inside | outside, total_s - high_s, blocks)
    boundary_bytes, cheap = _boundaries(blocks, sides, low_s, high_s, limit_bytes)
    return Windows(
        low_s=np.concatenate(([0.0], low_s, [total_s])),
        high_s=np.concatenate(([0.0], high_s, [total_s])),
        least_weight_bytes=np.concatenate(([0.0], least, [weight_bytes.sum()])),
        most_weight_bytes=np.concatenate(([0.0], weight_bytes.sum() - left_out, [weight_bytes.sum()])),
        boundary_bytes=np.concatenate(([0.0], boundary_bytes, [0.0])),
        cheap=cheap,
    )


def _edges(total_s: float, places_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Equal windows, and one for each place. Compute is a multiple of a unit, so that windows need not overlap."""
    unit_s = grid_s(total_s)
    some = places_s[np.unique(np.linspace(0, len(places_s) - 1, PLACES_AT_MOST).astype(int))] if len(places_s) else []
    even = np.rint(np.linspace(0.0, total_s, WINDOWS + 1) / unit_s) * unit_s
    edges = np.unique(np.concatenate((even, some, np.add(some, unit_s), [total_s + unit_s])))
    return edges[:-1], edges[1:] - unit_s


class Sides:
    """Which blocks are certainly before or behind a cut, by the compute before it."""

    def __init__(self, blocks: Blocks) -> None:
        graph = blocks.graph
        self._total_s = float(blocks.compute_s.sum())
        self._needed_s, self._dependent_s = (_sums(sets, blocks.compute_s) for sets in closures(graph))
        self._sources = [block for block, reads in enumerate(graph.reads) if not reads]
        self._sinks = [block for block, readers in enumerate(graph.read_by) if not readers]

    def certain(self, low_s: FloatArray, high_s: FloatArray) -> tuple[BoolArray, BoolArray]:
        """By window and block: before, and behind. A cut has something before it, and something behind."""
        inside = (self._total_s - self._dependent_s) < low_s[:, None]
        outside = self._needed_s > high_s[:, None]
        if len(self._sources) == 1 and len(self._sinks) == 1 and self._sources != self._sinks:
            inside[:, self._sources], inside[:, self._sinks] = True, False
            outside[:, self._sinks], outside[:, self._sources] = True, False
        return inside, outside


def _boundaries(
    blocks: Blocks, sides: Sides, low_s: FloatArray, high_s: FloatArray, limit_bytes: float
) -> tuple[FloatArray, tuple[int, ...]]:
    """By window the fewest bytes, and cuts within the limit. All windows first, then halves of what is within it."""
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


def _sums(sets: Sequence[int], values: FloatArray) -> FloatArray:
    """By set the sum over its members."""
    parts = [sets[start : start + _ROWS] for start in range(0, len(sets), _ROWS)]
    return np.concatenate([membership(part, len(values)) @ values for part in parts])


def _least_weights(certain: BoolArray, known: BoolArray, needed_s: FloatArray, blocks: Blocks) -> FloatArray:
    """By row the least weights of certain blocks and as many of the unknown ones as add up to the compute needed."""
    compute_s, weight_bytes = blocks.compute_s, blocks.weight_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        density = np.where(compute_s > 0, weight_bytes / compute_s, np.inf)
    by_density = np.argsort(density, kind="stable")
    unknown = ~known[:, by_density]
    seconds = np.cumsum(np.where(unknown, compute_s[by_density], 0.0), axis=1)
    weights = np.cumsum(np.where(unknown, weight_bytes[by_density], 0.0), axis=1)
    missing_s = needed_s - certain @ compute_s - compute_s.sum() * ROUNDING
    whole = (seconds <= missing_s[:, None]).sum(axis=1)
    rows = np.arange(len(certain))
    before = np.maximum(whole - 1, 0)
    taken_s = np.where(whole > 0, seconds[rows, before], 0.0)
    taken_bytes = np.where(whole > 0, weights[rows, before], 0.0)
    last = np.minimum(whole, len(compute_s) - 1)
    part = np.where((whole < len(compute_s)) & (missing_s > taken_s), missing_s - taken_s, 0.0)
    rest = part * np.where(np.isfinite(density[by_density][last]), density[by_density][last], 0.0)
    return np.asarray(certain @ weight_bytes + taken_bytes + rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """So many devices behind links of this speed; `exchange` is the factor of (m - 1)/m |w| / B for an update.

    `straight`: one device a stage.
    """

    devices: int
    bandwidth_bytes_per_s: float
    exchange: float
    straight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No plan is below these seconds: within `refuted_s` more `devices` would be needed; 0 where compute alone says so.

    All devices sharing all compute is the bound that is always there.
    """

    seconds: float
    refuted_s: float = 0.0
    devices: float = 0.0


def compute_bound(blocks: Blocks, machines: Machines, upper_s: float) -> Bound:
    """What all devices sharing all compute take; at most what some plan takes."""
    return Bound(seconds=min(float(blocks.compute_s.sum()) / machines.devices, upper_s))


def bound(windows: Windows, machines: Machines, upper_s: float) -> Bound:
    """A time below which no plan is; at most what some plan takes, `upper_s`."""
    low_s, high_s = min(float(windows.low_s[-1]) / machines.devices, upper_s), upper_s
    best = Bound(seconds=low_s)
    while high_s > low_s * (1 + PRECISION):
        middle_s = (low_s * high_s) ** 0.5
        devices = least_devices(windows, machines, middle_s)
        if devices > machines.devices:
            low_s, best = middle_s, Bound(seconds=middle_s, refuted_s=middle_s, devices=devices)
        else:
            high_s = middle_s
    return best


def least_devices(windows: Windows, machines: Machines, bottleneck_s: float) -> float:
    """The least devices on a path from the start to the end whose stages and boundaries stay within the bottleneck."""
    limit_bytes = bottleneck_s * machines.bandwidth_bytes_per_s / 2 * (1 + ROUNDING)
    allowed = windows.boundary_bytes <= limit_bytes
    allowed[[0, -1]] = True
    kept = np.flatnonzero(allowed)
    low_s, least = windows.low_s[kept], windows.least_weight_bytes[kept]
    devices = np.full(len(kept), np.inf)
    devices[-1] = 0.0
    for row, window in enumerate(kept[:-1].tolist()[::-1]):
        behind = slice(len(kept) - 1 - row, None)
        compute_s = low_s[behind] - windows.high_s[window]
        weight_bytes = least[behind] - windows.most_weight_bytes[window]
        stages = _need(compute_s, weight_bytes, machines, bottleneck_s) + devices[behind]
        devices[behind.start - 1] = stages.min()
    return float(devices[0])


def _need(compute_s: FloatArray, weight_bytes: FloatArray, machines: Machines, bottleneck_s: float) -> FloatArray:
    """The least m >= 1 with compute / m <= t and, for m >= 2, exchange (m - 1)/m^2 |w| / B <= t."""
    load = compute_s * ((1 - ROUNDING) / bottleneck_s)
    single = load <= 1
    if machines.straight:
        return np.where(single, 1.0, np.inf)
    half = weight_bytes * (machines.exchange / 2 * (1 - ROUNDING) / (machines.bandwidth_bytes_per_s * bottleneck_s))
    many = np.maximum(load, half + np.sqrt(np.maximum(half * (half - 2), 0.0)))
    return np.where(single, 1.0, np.maximum(np.ceil(many), 2.0))
