"""Search: best first through the space of configurations, until no bound allows anything better than what is kept."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.planners.two_bw.bounds import Configurations, RateBounds, expand
from pipeplan.planners.two_bw.candidate import Candidate, Evaluator
from pipeplan.planners.two_bw.shapes import ShapeRows, ShapeSpace
from pipeplan.planners.two_bw.terms import PipelineShape
from pipeplan.schedules.registry import schedule_names

FIRST_CONFIGURATIONS = 2_000
"""How many configurations are bounded before the first is split: enough for one that is good."""

MOST_CONFIGURATIONS = 200_000
"""How many are bounded at a time after that."""

WAITING = 20
"""How many of those that are not split are remembered of every chunk."""

TIE = 1e-12
"""Rates nearer to each other than this are equal."""

Preference = tuple[bool, int, int, int, int]


@dataclass(slots=True, kw_only=True)
class SearchCounts:
    """What became of the runnable configurations: too large by a bound on memory, or split into stages."""

    memory: int = 0
    split: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class BestFirstSearch:
    """The fastest configuration that fits, with what was seen on the way.

    `fitting` holds those that were the best, or as good, when they were found; `looked_at` all that were split, with
    the rate that bounds them; `waiting` the best of those that were not, with theirs; `examined` all that were bounded.
    """

    space: ShapeSpace
    evaluator: Evaluator
    best: Candidate | None = None
    fitting: list[Candidate] = field(default_factory=list)
    looked_at: list[tuple[float, PipelineShape]] = field(default_factory=list)
    counts: SearchCounts = field(default_factory=SearchCounts)
    waiting: list[tuple[float, PipelineShape]] = field(default_factory=list)
    examined: list[Configurations] = field(default_factory=list)
    _hopeless: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    bounds: list[RateBounds] = field(default_factory=list)

    def run(self) -> None:
        """Looks at everything that could be better than the best."""
        self.bounds = [self._bounds_of(rows) for rows in self.space.rows]
        for index, rows in self._chunks():
            self._look_through(self.bounds[index], expand(rows))

    def _bounds_of(self, rows: ShapeRows) -> RateBounds:
        return RateBounds(
            problem=self.space.problem,
            measured=self.space.measured,
            execution=rows.execution,
            master_weights=self.evaluator.master_weights,
        )

    @property
    def rate(self) -> float:
        """What is to be reached."""
        return self.best.throughput_samples_per_s if self.best else 0.0

    def _chunks(self) -> Iterator[tuple[int, ShapeRows]]:
        """The rows of all executions, those first whose bound is highest, a chunk at a time while any can win."""
        queues = [self._queue(bound, rows) for bound, rows in zip(self.bounds, self.space.rows, strict=True)]
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

    def _queue(self, bounds: RateBounds, rows: ShapeRows) -> tuple[FloatArray, ShapeRows]:
        rates = bounds.row_rates(rows)
        order = np.argsort(-rates, kind="stable")
        return rates[order], rows.some(order)

    def _look_through(self, bounds: RateBounds, found: Configurations) -> None:
        self.examined.append(found)
        fits = np.flatnonzero(bounds.least_bytes(found) <= self.evaluator.device_bytes)
        self.counts.memory += (len(found) - len(fits)) * found.execution.ways
        found = found.some(fits)
        least_s = bounds.least_s(found)
        self._split_best_first(found, least_s, bounds.rates(found, least_s))

    def _split_best_first(self, found: Configurations, least_s: FloatArray, rates: FloatArray) -> None:
        able: IntArray = np.flatnonzero(rates >= self.rate * (1 - TIE)).astype(np.int64)
        order = able[self._order(found, rates, able)]
        looked_at = np.zeros(len(found), dtype=bool)
        for index in order.tolist():
            if rates[index] < self.rate * (1 - TIE):
                break
            looked_at[index] = True
            self._look_at(self.shape(found, index), float(least_s[index]), float(rates[index]))
        self._keep_waiting(found, np.where(looked_at, 0.0, rates))

    def _keep_waiting(self, found: Configurations, rates: FloatArray) -> None:
        """Notes the best of what was not looked at."""
        best = np.argpartition(-rates, WAITING)[:WAITING] if len(rates) > WAITING else np.arange(len(rates))
        self.waiting += [(float(rates[i]), self.shape(found, i)) for i in best.tolist() if rates[i] > 0]

    def _order(self, found: Configurations, rates: FloatArray, able: IntArray) -> IntArray:
        """The highest bound first; of equal ones what is preferred."""
        keys = (found.size[able], found.depth[able], found.width[able] * found.depth[able], -rates[able])
        return np.asarray(np.lexsort(keys), dtype=np.int64)

    def shape(self, found: Configurations, index: int) -> PipelineShape:
        """One of the configurations."""
        return self.space.shape(
            found.execution,
            int(found.width[index]),
            int(found.size[index]),
            int(found.microbatches[index]),
            int(found.depth[index]),
        )

    def _look_at(self, shape: PipelineShape, least_s: float, rate: float) -> None:
        ceiling_s = np.inf
        if self.best is not None:
            if rate <= self.rate * (1 + TIE) and self.preference(shape) > self.preference(self.best.shape):
                return
            ceiling_s = shape.width * shape.microbatch_size / self.rate * (1 + TIE)
        key = memory_key(shape)
        step_s = np.inf if not shape.laws.pipelined else ceiling_s / shape.slots
        if step_s <= self._hopeless.get(key, 0.0):
            return
        self.counts.split += 2 if shape.recompute is None else 1
        self.looked_at.append((rate, shape))
        if not self.evaluator.possible(shape, step_s):
            self._hopeless[key] = step_s
            return
        found = self.evaluator.fastest(shape, least_time_s=least_s, ceiling_s=ceiling_s)
        if found is None:
            return
        self.fitting.append(found)
        if self.best is None or self._better(found, self.best):
            self.best = found

    def _better(self, one: Candidate, other: Candidate) -> bool:
        rate, best = one.throughput_samples_per_s, other.throughput_samples_per_s
        if abs(rate - best) <= TIE * best:
            return self.preference(one.shape) < self.preference(other.shape)
        return rate > best

    def preference(self, shape: PipelineShape) -> Preference:
        """Among equal rates: a size that was measured, fewer devices, less depth, smaller microbatches."""
        interpolated = shape.microbatch_size not in self.space.problem.profile.microbatch_sizes
        return interpolated, shape.devices, shape.depth, shape.microbatch_size, schedule_names().index(shape.schedule)


def memory_key(shape: PipelineShape) -> tuple[str, int, int, int]:
    """What the memory of a shape's stages depends on: not the width, and the batch only where it is flushed."""
    laws = shape.laws
    counts = laws.pipelined and (laws.flushes or not laws.fills)
    microbatches = shape.microbatches if counts else 0
    return shape.schedule, shape.depth, shape.microbatch_size, microbatches
