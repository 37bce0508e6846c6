"""The terms of a pipeline of equal replicas: PipeDream-2BW, appendix A.1, on the links that its placement crosses.

A stage's time a microbatch is max(compute + activation transfer, gradient exchange / microbatches): every edge that
the stage really has carries a microbatch's activations one way and their gradients the other. All tables are those of
`split.Costs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.core.cluster import Cluster
from planner_service.core.cost.all_reduce import all_reduce
from planner_service.core.cost.compute import FloatArray
from planner_service.core.cost.memory import Copies, copies
from planner_service.core.cost.transfer import Bandwidths
from planner_service.core.plan import Worker
from planner_service.core.planner.split import Costs, Search, Starts, every_start, starts_within
from planner_service.core.planner.tables import Tables
from planner_service.core.schedule.program import pipelines_in_a_row, stages_in_a_row

FLUSHED = ("1f1b", "gpipe")
"""Pipelined schedules that pay for filling and draining: (m + d - 1) / m."""

UNPIPELINED = ("data-parallel", "naive")
"""Schedules whose stages work one after the other: a microbatch takes their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A configuration of 2BW's search: everything but where the stages begin."""

    schedule: str
    width: int
    depth: int
    microbatch_size: int
    microbatches: int
    recompute: bool

    @property
    def devices(self) -> int:
        """How many it uses."""
        return self.width * self.depth

    @property
    def slots(self) -> float:
        """Time of a batch in steps of the slowest stage, a microbatch."""
        if self.schedule in FLUSHED:
            return (self.microbatches + self.depth - 1) / self.microbatches
        return 1.0

    @property
    def bubble_fraction(self) -> float:
        """The share of idle time among equal stages."""
        if self.schedule in UNPIPELINED:
            return (self.depth - 1) / self.depth
        return (self.depth - 1) / (self.microbatches + self.depth - 1) if self.schedule in FLUSHED else 0.0

    def throughput_samples_per_s(self, time_per_microbatch_s: float) -> float:
        """The whole job's: the paper's b / t is that of one of the `width` pipelines."""
        return self.width * self.microbatch_size / time_per_microbatch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The bandwidths of an orientation: of every edge between stages, and among every stage's replicas.

    `place` makes the placement from the stages' replicas.
    """

    place: Callable[[Sequence[int]], tuple[Worker, ...]]
    edges: FloatArray
    groups: FloatArray


def orientations(cluster: Cluster, width: int, depth: int) -> tuple[Links, ...]:
    """Pipelines in a row, and stages in a row unless its links are the same: 2BW orients by trying both.

    The slowest link of all replicas counts. Which replicas share a server decides whether pipelines or gradient
    exchanges stay inside it; a width that fills a server stays inside as well.
    """
    bandwidths = Bandwidths(cluster)
    stages = np.arange(depth)
    ranks = np.arange(width)[:, None] * depth + stages[:-1]
    pipelines = Links(
        place=pipelines_in_a_row,
        edges=bandwidths.spanning(ranks, ranks + 1).min(axis=0),
        groups=bandwidths.spanning(stages, stages + (width - 1) * depth),
    )
    low = stages * width
    row = Links(
        place=stages_in_a_row,
        # Replica r's edge spans the ranks [sw + r, (s + 1)w + r]; together they span [sw, sw + 2w - 1].
        edges=bandwidths.spanning(low[:-1], low[:-1] + 2 * width - 1),
        groups=bandwidths.spanning(low, low + width - 1),
    )
    same = np.array_equal(pipelines.edges, row.edges) and np.array_equal(pipelines.groups, row.groups)
    return (pipelines,) if same else (pipelines, row)


@dataclass(frozen=True, kw_only=True)
class PipelineTerms:
    """A shape's stages on the links of one orientation, by the accounting of memory that was asked for."""

    shape: Shape
    links: Links
    tables: Tables
    compute_s: FloatArray
    accounting: str
    optimizer: str
    device_bytes: int

    def time_s(self, stage: int, starts: slice, lasts: slice) -> FloatArray:
        """A stage's time a microbatch."""
        busy_s = self.compute_s[starts, lasts]
        if stage > 0:
            before = self.tables.boundary_bytes[starts.start - 1 : starts.stop - 1]
            busy_s = busy_s + (before / self.links.edges[stage - 1])[:, None]
        if stage < self.shape.depth - 1:
            busy_s = busy_s + self.tables.boundary_bytes[lasts] / self.links.edges[stage]
        if self.shape.width == 1:
            return busy_s
        share = all_reduce(np.asarray(float(self.shape.width)))
        exchange_s = share * self.tables.weight_bytes[starts, lasts] / self.links.groups[stage]
        return np.asarray(np.maximum(busy_s, exchange_s / self.shape.microbatches))

    def held(self, stage: int) -> Copies:
        """What a worker of a stage holds, in counts."""
        return copies(
            self.accounting,
            self.shape.schedule,
            self.optimizer,
            recompute=self.shape.recompute,
            depth=self.shape.depth,
            stage=stage,
            microbatches=self.shape.microbatches,
        )

    def memory_bytes(self, stage: int, starts: slice, lasts: slice) -> FloatArray:
        """What a worker of a stage holds; infinite below the diagonal."""
        return self.tables.memory_bytes(self.held(stage), starts, lasts)

    def fitting(self, costs: Costs) -> Costs:
        """A stage's costs, infinite where it does not fit its device."""

        def where_it_fits(stage: int, starts: slice, lasts: slice) -> FloatArray:
            cost = costs(stage, starts, lasts)
            if self.tables.all_fit(self.held(stage), self.device_bytes):
                return cost
            return np.where(self.memory_bytes(stage, starts, lasts) <= self.device_bytes, cost, np.inf)

        return where_it_fits

    def fitting_starts(self) -> Starts | None:
        """Where the stages of splits that fit may start; None if none fits."""
        return starts_within(self._held_sums, self.device_bytes, self._every_start)

    def fastest(self, starts: Starts, about_s: float) -> Search:
        """The search for the fastest split among those that fit."""
        sums_s = [0.0, *self.compute_s[0].tolist()]
        return Search(costs=self.fitting(self.time_s), works=lambda _: sums_s, starts=starts, about=about_s)

    def smallest(self) -> Search:
        """The search for the split whose worst stage holds the least."""
        return Search(
            costs=self.memory_bytes, works=self._held_sums, starts=self._every_start, about=self.least_bytes()
        )

    @property
    def _every_start(self) -> Starts:
        return every_start(self.tables.blocks, self.shape.depth)

    def _held_sums(self, stage: int) -> list[float]:
        return self.tables.held_sums(self.held(stage))

    def least_bytes(self) -> float:
        """No split holds less on its worst stage, whatever the stages are.

        If none holds more than x, stage s has at most (x - c W_s) / a_s of the activations, with c copies of weights
        and a_s of activations; summed over the stages that bounds all activations, and x from below.
        """
        held = [self.held(stage) for stage in range(self.shape.depth)]
        weights, activations = self.tables.total_bytes
        most = max(counts.activations for counts in held)
        shares = sum(1.0 / counts.activations for counts in held)
        return (activations + held[0].weights * weights / most) / shares
