"""Placements: which devices hold which stages and replicas, and the bandwidths that this leaves.

The two ends are pipelines in a row and stages in a row (`orientations`); between them a unit of devices holds some
replicas of some consecutive stages (`mixtures`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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

    The slowest link of all replicas counts. Which replicas share a server decides whether pipelines or gradient
    exchanges stay inside it; a width that fills a server stays inside as well, which the paper's bandwidth_width(w)
    excludes.
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
    divides both (2BW 2021, section 3.3, has the two ends alone).
    """
    bandwidths, unit = Bandwidths(cluster), 1
    for level in cluster.levels[:-1]:
        unit *= level.size
        for replicas in range(2, min(width, unit)):
            stages = unit // replicas
            if unit % replicas or width % replicas or depth % stages:
                continue
            place = _Mixed(replicas=replicas, stages=stages)
            by_unit = np.arange(width * depth).reshape(width // replicas, depth // stages, stages, replicas)
            ranks = by_unit.transpose(1, 2, 0, 3).reshape(depth, width)
            low, high = np.minimum(ranks[:-1], ranks[1:]), np.maximum(ranks[:-1], ranks[1:])
            yield Links(
                place=place,
                ranks=ranks,
                edges=bandwidths.of_levels(bandwidths.levels(low, high).max(axis=1)),
                groups=bandwidths.spanning(ranks.min(axis=1), ranks.max(axis=1)),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixed:
    """Units of `stages` consecutive stages with `replicas` of each, the units of a pipeline in a row."""

    replicas: int
    stages: int

    def __call__(self, widths: Sequence[int]) -> tuple[Worker, ...]:
        """The placement of stages that all have as many replicas."""
        return tuple(
            Worker(stage=stage, replica=replica)
            for first_replica in range(0, widths[0], self.replicas)
            for first_stage in range(0, len(widths), self.stages)
            for stage in range(first_stage, first_stage + self.stages)
            for replica in range(first_replica, first_replica + self.replicas)
        )
