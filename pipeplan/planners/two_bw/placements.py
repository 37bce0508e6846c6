"""Placements: the devices of stages and replicas, and the resulting bandwidths.

The two ends are pipelines in a row and stages in a row (`orientations`); between them a unit of devices holds some
replicas of some consecutive stages (`mixtures`), of a server, of a rack, or of both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.transfer import Bandwidths
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Worker
from pipeplan.programs.program import pipelines_in_a_row, stages_in_a_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The bandwidths of an orientation: of every edge between stages, and among every stage's replicas.

    `place` makes the placement from the stages' replicas; `ranks[stage, replica]` is the same for these.
    """

    place: Callable[[Sequence[int]], tuple[Worker, ...]]
    ranks: IntArray
    edges: FloatArray
    groups: FloatArray


def orientations(cluster: Cluster, width: int, depth: int) -> tuple[Links, ...]:
    """Pipelines in a row, and stages in a row unless its links are the same: 2BW orients by trying both.

    The slowest link of all replicas counts. A server holds pipelines, or replicas of a stage whose gradient exchange
    then stays inside it; unlike the paper's bandwidth_width(w), a width that fills a server stays inside as well.
    """
    bandwidths = Bandwidths(cluster)
    stages = np.arange(depth)

    # The level that the edge after each stage reaches up to, on the pipeline where it reaches farthest.
    levels = np.zeros(depth - 1, dtype=np.int64)
    for unit in bandwidths.units.tolist():
        # Rank r d + s + 1 begins a unit for some r < w: the first such r repeats after unit / gcd(d, unit).
        starts = np.zeros(unit, dtype=bool)
        starts[np.arange(min(width, unit), dtype=np.int64) * depth % unit] = True
        levels += starts[-stages[1:] % unit]

    pipelines = Links(
        place=pipelines_in_a_row,
        ranks=np.arange(width * depth).reshape(width, depth).T,
        edges=bandwidths.of_levels(levels),
        groups=bandwidths.spanning(stages, stages + (width - 1) * depth),
    )
    low = stages * width
    row = Links(
        place=stages_in_a_row,
        ranks=np.arange(width * depth).reshape(depth, width),
        # Replica r's edge spans the ranks [sw + r, (s + 1)w + r]; together they span [sw, sw + 2w - 1].
        edges=bandwidths.spanning(low[:-1], low[:-1] + 2 * width - 1),
        groups=bandwidths.spanning(low, low + width - 1),
    )
    same = np.array_equal(pipelines.edges, row.edges) and np.array_equal(pipelines.groups, row.groups)
    return (pipelines,) if same else (pipelines, row)


def mixtures(cluster: Cluster, width: int, depth: int) -> Iterator[Links]:
    """Some replicas of several stages in each unit: between pipelines in a row (one replica) and stages in a row.

    On every level of the cluster, with k replicas of u / k consecutive stages in a unit of u devices, for every k that
    divides both (2BW 2021, section 3.3, has only the two ends). On several levels, each has its own k: a server may
    have one replica of some stages, and its rack several of them.
    """
    bandwidths, devices = Bandwidths(cluster), np.arange(width * depth)
    known = {devices.reshape(width, depth).T.tobytes(), devices.reshape(depth, width).tobytes()}
    for grids in _grids(cluster):
        replicas, stages = prod(of for of, _ in grids), prod(of for _, of in grids)
        if width % replicas or depth % stages:
            continue
        inside = (count for grid in grids for count in reversed(grid))
        by_unit = devices.reshape(width // replicas, depth // stages, *inside)
        axes = range(by_unit.ndim)
        ranks = by_unit.transpose(*axes[1:2], *axes[2::2], *axes[:1], *axes[3::2]).reshape(depth, width)
        if ranks.tobytes() in known:
            continue
        known.add(ranks.tobytes())
        low, high = np.minimum(ranks[:-1], ranks[1:]), np.maximum(ranks[:-1], ranks[1:])
        yield Links(
            place=_Mixed(ranks=ranks),
            ranks=ranks,
            edges=bandwidths.of_levels(bandwidths.levels(low, high).max(axis=1)),
            groups=bandwidths.spanning(ranks.min(axis=1), ranks.max(axis=1)),
        )


Grid: TypeAlias = tuple[int, int]
"""The replicas and the consecutive stages of a unit, by the units inside it: as many as their product."""


def _grids(cluster: Cluster) -> Iterator[tuple[Grid, ...]]:
    """A grid of a unit's devices, for every level but the outermost; and combinations of several levels' grids, the
    outer ones first.
    """
    for unit in Bandwidths(cluster).units.tolist():
        yield from (((replicas, unit // replicas),) for replicas in range(2, unit) if unit % replicas == 0)
    sizes = [level.size for level in reversed(cluster.levels[:-1])]
    if len(sizes) > 1:
        yield from product(*([(k, size // k) for k in range(1, size + 1) if size % k == 0] for size in sizes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mixed:
    """Workers on the devices `ranks[stage, replica]`."""

    ranks: IntArray

    def __call__(self, widths: Sequence[int]) -> tuple[Worker, ...]:
        """The placement of stages of equal width."""
        stages, replicas = np.divmod(np.argsort(self.ranks, axis=None), widths[0])
        return tuple(
            Worker(stage=stage, replica=replica)
            for stage, replica in zip(stages.tolist(), replicas.tolist(), strict=True)
        )
