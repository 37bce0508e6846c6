"""Search: 2BW's algorithm 1, best first through the space of configurations until no bound allows a better one.

PipeDream-2BW (Narayanan et al. 2021), appendix A.2, algorithm 1. Comments number its steps, 1 to 6.

Where we differ: steps 3 and 4 are bounded first, for many configurations at once (`bounds`). Only a configuration whose
bound reaches t_max is split into stages, and that gives its true time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.planners.two_bw.bounds import Configurations, RateBounds, expand
from pipeplan.planners.two_bw.candidate import Candidate, Evaluator
from pipeplan.planners.two_bw.shapes import ShapeRows, ShapeSpace
from pipeplan.planners.two_bw.split import TIE
from pipeplan.planners.two_bw.terms import PipelineShape
from pipeplan.schedules.registry import order_of

FIRST_CONFIGURATIONS = 2_000
"""The number of configurations bounded before the first is split: enough to find a good one among them."""

MOST_CONFIGURATIONS = 200_000
"""The number bounded at a time after that."""

REMEMBERED = 21
"""The pairs of width and depth of a chunk that are remembered as alternatives: those that a plan keeps, and its own."""

Preference = tuple[bool, int, int, int, tuple[int, str]]

MemoryKey = tuple[str, int, int, int]


@dataclass(slots=True, kw_only=True)
class SearchCounts:
    """The outcome for runnable configurations: too large by a bound on memory, or split into stages."""

    memory: int = 0
    split: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class BestFirstSearch:
    """The fastest configuration that fits, with the search's record.

    `seen` holds the best by their bounds, each with the rate that bounds it; `examined` all that were bounded.
    """

    space: ShapeSpace
    evaluator: Evaluator
    best: Candidate | None = None
    seen: list[tuple[float, PipelineShape]] = field(default_factory=list)
    counts: SearchCounts = field(default_factory=SearchCounts)
    examined: list[Configurations] = field(default_factory=list)
    _hopeless: dict[MemoryKey, float] = field(default_factory=dict)
    bounds: list[RateBounds] = field(default_factory=list)

    def run(self) -> None:
        """Examines every configuration that could be better than the best."""
        self.bounds = [
            RateBounds(
                problem=self.space.problem,
                measured=self.space.measured,
                execution=rows.execution,
                master_weights=self.evaluator.master_weights,
            )
            for rows in self.space.rows
        ]
        # 1. For w = 1 to N, for d = 1 to N / w: `ShapeSpace` has a row a width with all its depths.
        # 2. SEARCH(w, d, B): b is a part of a row, and r is an execution or left to every stage.
        for execution, rows in self._chunks():
            bounds, found = self.bounds[execution], expand(rows)
            self.examined.append(found)

            # 4. MEMORY(w, d, b, r) > M: skip; by a bound on all splits (A.1.2, `costs.memory.paper_copies`).
            fits = np.flatnonzero(bounds.least_bytes(found) <= self.evaluator.device_bytes)
            self.counts.memory += (len(found) - len(fits)) * found.execution.ways
            found = found.some(fits)

            # 3. THROUGHPUT(w, d, b, r), A.1.1: by a bound on all splits.
            least_s = bounds.least_s(found)
            rates = bounds.rates(found, least_s)
            self._remember(found, rates)

            # The highest rate first; ties in the order of preference.
            keys = (found.size, found.depth, found.width * found.depth, -rates)
            for index in np.lexsort(keys).tolist():
                if rates[index] <= 0.0 or rates[index] < self.rate * (1 - TIE):
                    break
                self._look_at(self.shape(found, index), float(least_s[index]), float(rates[index]))

    def _remember(self, found: Configurations, rates: FloatArray) -> None:
        """The best pairs of width and depth, each at its best size, are remembered as alternatives."""
        sizes = np.asarray(self.space.measured.sizes)
        best, most = np.flatnonzero(rates > 0), REMEMBERED * len(sizes)
        if len(best) > most:
            best = best[np.argpartition(-rates[best], most)[:most]]
        size, depth, devices = found.size[best], found.depth[best], (found.width * found.depth)[best]
        interpolated = ~np.isin(sizes[size], self.space.profiled_sizes)
        best = best[np.lexsort((size, depth, devices, interpolated, -rates[best]))]
        pairs = found.width[best] * (int(found.depth.max(initial=0)) + 1) + found.depth[best]
        _, first = np.unique(pairs, return_index=True)
        self.seen += [(float(rates[i]), self.shape(found, i)) for i in best[np.sort(first)[:REMEMBERED]].tolist()]

    @property
    def rate(self) -> float:
        """The highest throughput so far: algorithm 1's t_max."""
        return self.best.throughput_samples_per_s if self.best else 0.0

    def _chunks(self) -> Iterator[tuple[int, ShapeRows]]:
        """The rows of all executions, the highest bounds first, a chunk at a time while any can win."""
        queues: list[tuple[FloatArray, ShapeRows]] = []
        for bounds, rows in zip(self.bounds, self.space.rows, strict=True):
            rates = bounds.row_rates(rows)
            order = np.argsort(-rates, kind="stable")
            queues.append((rates[order], rows.some(order)))

        configurations = FIRST_CONFIGURATIONS
        while True:
            tops = [float(rates[0]) if len(rates) else 0.0 for rates, _ in queues]
            index = int(np.argmax(tops)) if tops else 0
            if not tops or tops[index] <= 0.0 or tops[index] < self.rate * (1 - TIE):
                return
            rates, rows = queues[index]
            deep_enough = self.bounds[index].deep_enough(rows, self.rate)
            fit = int(np.searchsorted(np.cumsum(deep_enough.depths), configurations, side="right"))
            able = int(np.searchsorted(-rates, -self.rate * (1 - TIE), side="right"))
            taken = max(min(fit, able), 1)
            queues[index] = rates[taken:], rows.some(np.arange(taken, len(rows)))
            configurations = MOST_CONFIGURATIONS
            yield index, deep_enough.some(np.arange(taken))

    def _look_at(self, shape: PipelineShape, least_s: float, rate: float) -> None:
        """Steps 3 to 5 for one configuration with its best split, unless it is known to lose.

        6. g_opt = B / (N b_opt): here a row has the microbatches of a batch from the beginning, m = B / (w b) = g d.
        """
        ceiling_s = np.inf
        if self.best is not None:
            if rate <= self.rate * (1 + TIE) and self.preference(shape) > self.preference(self.best.shape):
                return
            ceiling_s = shape.width * shape.microbatch_size / self.rate * (1 + TIE)

        # At another width with the same memory, a step of at most `step_s` was impossible, and so it is here.
        key = memory_key(shape)
        step_s = np.inf if not shape.laws.pipelined else ceiling_s / shape.slots
        if step_s <= self._hopeless.get(key, 0.0):
            return
        self.counts.split += 2 if shape.recompute is None else 1
        if not self.evaluator.possible(shape, step_s):
            self._hopeless[key] = step_s
            return

        found = self.evaluator.fastest(shape, least_time_s=least_s, ceiling_s=ceiling_s)
        if found is None:
            return
        rate = found.throughput_samples_per_s  # 5. t > t_max: keep.
        tie = abs(rate - self.rate) <= TIE * self.rate
        if self.best is None or (
            self.preference(shape) < self.preference(self.best.shape) if tie else rate > self.rate
        ):
            self.best = found

    def shape(self, found: Configurations, index: int) -> PipelineShape:
        """One of the configurations."""
        return self.space.shape(
            found.execution,
            int(found.width[index]),
            int(found.size[index]),
            int(found.microbatches[index]),
            int(found.depth[index]),
        )

    def preference(self, shape: PipelineShape) -> Preference:
        """The order of equal rates: a measured size first, then fewer devices, less depth, smaller microbatches."""
        interpolated = shape.microbatch_size not in self.space.profiled_sizes
        return interpolated, shape.devices, shape.depth, shape.microbatch_size, order_of(shape.schedule)


def memory_key(shape: PipelineShape) -> MemoryKey:
    """The inputs of the stages' memory: without the width, and with the batch only where it is flushed."""
    laws = shape.laws
    counts = laws.pipelined and (laws.flushes or not laws.fills)
    microbatches = shape.microbatches if counts else 0
    return shape.schedule, shape.depth, shape.microbatch_size, microbatches
