"""Space: everything that auto may play, as shapes on placements, each with an upper bound on its rate.

A configuration is a schedule, a shape (`two_bw.terms.PipelineShape`) and a placement, on any number of the devices. Its
stages are those of the closed form's best split, whose memory fits. Schedules whose ranks hold several stages are in
`chunks`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.documents.plan import Alternative, Plan
from pipeplan.planners.auto.model import SearchedModel
from pipeplan.planners.auto.splits import SplitsWithin, splits_above, whole_splits
from pipeplan.planners.auto.wiring import Wiring
from pipeplan.planners.complete import complete
from pipeplan.planners.problem import CutGraph, PlanningProblem, recompute_units
from pipeplan.planners.reasons import unpriced
from pipeplan.planners.spaces import EverySplit, Splits
from pipeplan.planners.two_bw.bounds import Configurations, RateBounds
from pipeplan.planners.two_bw.candidate import Candidate, Evaluator, candidate, decision
from pipeplan.planners.two_bw.chosen import chosen
from pipeplan.planners.two_bw.shapes import Execution
from pipeplan.planners.two_bw.terms import PipelineShape
from pipeplan.schedules.registry import schedule_named

SEARCHED = ("data-parallel", "naive", "pipedream-2bw", "1f1b", "gpipe")
"""The schedules that the closed forms split into stages; schedules that split the backward are tried on their plans."""

SHORT = 50
"""Upper bound on the blocks of a model whose stages have a table: longer models have too many stages."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedShape:
    """A shape on a placement: `most` is the upper bound on its plays' rate, `likely` the rate with equal stages.

    Both are samples a second.
    """

    space: "PlayedSpace"
    shape: PipelineShape
    wiring: Wiring
    most: float
    likely: float

    @property
    def schedule(self) -> str:
        """The name of its schedule."""
        return self.shape.schedule

    def split(self) -> tuple[int, ...] | None:
        """The stops of the closed form's best split; None if none fits."""
        found = self.space.fastest(self)
        return None if found is None else self.space.evaluator.stops(found)

    def most_of(self, stops: tuple[int, ...]) -> float:
        """Upper bound on samples a second with these stages, by their compute."""
        return self.space.most_of(self, stops)

    def most_of_any(self) -> float:
        """Upper bound on samples a second with any stages."""
        if self.space.evaluator.measured.blocks > SHORT:
            return self.most
        slowest_s = self._splits(0.0).slowest_s
        return min(self.most, self.shape.batch_size / (slowest_s * (1 - _ROUNDING))) if slowest_s > 0 else self.most

    def splits_above(self, rate: float, split: tuple[int, ...]) -> Splits:
        """The splits that fit, and may play faster by their compute and transfers."""
        if self.space.evaluator.measured.blocks > SHORT:
            return EverySplit(split, self.most_of, rate)
        return self._splits(rate)

    def _splits(self, rate: float) -> SplitsWithin:
        terms = self.space.evaluator.terms(self.shape, self.wiring.links)
        return splits_above(rate, self.space.model, terms, self.wiring)

    def plan(self, stops: tuple[int, ...]) -> Plan | None:
        """Its plan with these stages, not played, for the original model; None if the stages do not fit."""
        return self.space.plan(self, stops)

    def alternative(self, reason: str) -> Alternative:
        """Its entry among a plan's alternatives, without a price."""
        return unpriced(self.shape, reason, recompute=bool(self.shape.recompute))


@dataclass(frozen=True, kw_only=True, eq=False)
class PlayedSpace:
    """The configurations of a problem with these schedules; with `straight` those of one pipeline of this depth."""

    problem: PlanningProblem
    schedules: tuple[str, ...] = SEARCHED
    straight: int | None = None
    planner: str = "pipedream-2bw"
    beyond: float = 0.0

    @property
    def graph(self) -> CutGraph | None:
        """The graph that the chain represents, if there is one."""
        return self.problem.graph

    @cached_property
    def model(self) -> SearchedModel:
        """The model on the cluster."""
        return SearchedModel(problem=self.problem)

    @property
    def evaluator(self) -> Evaluator:
        """Splits shapes. Raises InvalidInputError if no microbatch size divides the batch."""
        return self.model.evaluator

    @cached_property
    def considered(self) -> int:
        """The number of shapes."""
        return sum(len(found) for found, _ in self._bounded)

    def configurations(self) -> Iterator[PlacedShape]:
        """All shapes that memory does not rule out, the highest bound first; of equal bounds the likely fastest first.

        They are made as they are needed.
        """
        waiting: list[tuple[float, float, int, int, int, PlacedShape]] = []
        rates = np.concatenate([np.zeros(0), *(rates for _, rates in self._bounded)])
        firsts = np.cumsum([0, *(len(found) for found, _ in self._bounded)])
        numbers = count()
        for index in np.argsort(-rates, kind="stable").tolist():
            rate = float(rates[index])
            while waiting and -waiting[0][0] > rate:
                yield heappop(waiting)[-1]
            if rate <= 0.0:
                break
            part = int(np.searchsorted(firsts, index, side="right")) - 1
            shape = self._bounded[part][0].shape(index - int(firsts[part]), self.evaluator.measured.sizes)
            for wiring in self.model.wirings(shape.width, shape.depth):
                each = self._configuration(shape, wiring, rate)
                heappush(waiting, (-each.most, -each.likely, shape.devices, shape.depth, next(numbers), each))
        while waiting:
            yield heappop(waiting)[-1]

    def fastest(self, configuration: PlacedShape) -> Candidate | None:
        """The closed form's best split; None where no split fits."""
        return self.evaluator.fastest(configuration.shape, on=(configuration.wiring.links,))

    def most_of(self, configuration: PlacedShape, stops: tuple[int, ...]) -> float:
        """Upper bound on samples a second with these stages, by their compute and transfers."""
        shape, terms = configuration.shape, self.evaluator.terms(configuration.shape, configuration.wiring.links)
        busy_s, ways_s = np.zeros((2, 1, shape.depth))
        for index, stage in enumerate(chosen(terms, stops)):
            own = self.model.sums(shape.schedule, shape.microbatch_size, stage.recompute)
            if shape.laws.pipelined:
                busy_s[0, index] = shape.microbatches * (own.compute_s[stage.stop] - own.compute_s[stage.start])
            ways_s[0, index] = own.way_s[stage.stop] - own.way_s[stage.start]
        whole = whole_splits(self.model, terms, configuration.wiring)
        least_s = float(whole.least_s(np.asarray([stops]), busy_s, ways_s)[0])
        return min(configuration.most, shape.batch_size / (least_s * (1 - _ROUNDING))) if least_s > 0 else inf

    def plan(self, configuration: PlacedShape, stops: tuple[int, ...]) -> Plan | None:
        """The configuration's plan with these stages, not played, of the model as it was given; None if too large."""
        shape, terms = configuration.shape, self.evaluator.terms(configuration.shape, configuration.wiring.links)
        stages = chosen(terms, stops)
        if not all(stage.fits for stage in stages):
            return None
        stages_s = [stage.time_s for stage in stages]
        found = candidate(shape, terms, None, max(stages_s) if shape.laws.pipelined else sum(stages_s))
        made = decision("pipedream-2bw", "pipedream-2bw-a.1", found, stops, considered=1, alternatives=())
        return complete(self.problem, made)

    @cached_property
    def _bounded(self) -> list[tuple[Configurations, FloatArray]]:
        """The shapes of every schedule, with upper bounds on their samples a second on any placement.

        0 where no split fits the devices' memory.
        """
        options, devices = self.problem.options, self.problem.cluster.devices
        bounded = []
        for name in self.schedules:
            laws = schedule_named(name)
            recompute = options.recompute
            if recompute is None and not laws.pipelined and "block" not in recompute_units(self.problem, laws):
                recompute = False
            asked = options.schedule is not None
            execution = Execution(
                schedule=name,
                recompute=recompute,
                shallowest=1 if laws.single_stage or not laws.flushes or asked else 2,
                deepest=1 if laws.single_stage else min(devices, self.evaluator.measured.blocks),
            )
            found = self._found(execution)
            bounds = RateBounds(
                problem=self.problem,
                measured=self.evaluator.measured,
                execution=execution,
                master_weights=self.evaluator.master_weights,
            )
            fits = bounds.least_bytes(found) <= self.evaluator.device_bytes
            bounded.append((found, np.where(fits, self._rates(found), 0.0)))
        return bounded

    def _found(self, execution: Execution) -> Configurations:
        """The shapes that the batch, the devices and the options allow."""
        devices, sizes = self.problem.cluster.devices, np.asarray(self.evaluator.measured.sizes)
        widths = np.arange(1, 1 + (1 if self.straight else devices))
        depths = np.arange(execution.shallowest, execution.deepest + 1)
        for fixed in (self.problem.options.stages, self.straight):
            depths = depths if fixed is None else depths[depths == fixed]
        place, size = np.nonzero(self.problem.batch_size % (widths[:, None] * sizes) == 0)
        width = np.repeat(widths[place], len(depths))
        size = np.repeat(size, len(depths))
        found = Configurations(
            execution=execution,
            width=width,
            depth=np.tile(depths, len(place)),
            size=size,
            microbatches=self.problem.batch_size // (width * sizes[size]),
        )
        able = found.width * found.depth <= devices
        if execution.laws.microbatch_a_stage:
            able &= found.microbatches >= found.depth
        return found.some(np.flatnonzero(able))

    def _rates(self, found: Configurations) -> FloatArray:
        """Samples a second by compute alone."""
        laws, m, depth = found.execution.laws, found.microbatches, found.depth
        execution = found.execution
        sizes = self.evaluator.measured.sizes
        sums = [self.model.sums(execution.schedule, size, execution.recompute) for size in sizes]
        compute_s = np.asarray([each.compute_s[-1] for each in sums])[found.size]
        block_s = np.asarray([each.block_s for each in sums])[found.size]
        way_s = np.asarray([each.way_s[-1] for each in sums])[found.size]
        least_s = m * np.maximum(compute_s / depth, block_s)
        if not laws.pipelined:  # a microbatch passes all stages before the next one begins (`bound`, 4)
            least_s = np.maximum(least_s, m * way_s)
        elif laws.flushes:
            # Stages that each take 1 - 1/m of the one before end together: no others are as fast (`bound`, 3).
            least_s = np.maximum(least_s, way_s / (1.0 - (1.0 - 1.0 / m) ** depth))
        with np.errstate(divide="ignore"):
            return np.asarray(self.problem.batch_size / (least_s * (1 - _ROUNDING)))

    def _configuration(self, shape: PipelineShape, wiring: Wiring, most: float) -> PlacedShape:
        """Bounds from the whole model, and the rate of equal stages; `most` bounds the shape on any placement."""
        laws, m, depth = shape.laws, shape.microbatches, shape.depth
        sums = self.model.sums(shape.schedule, shape.microbatch_size, shape.recompute)
        total_s, mean_bytes, weights = sums.total_s, sums.mean_boundary_bytes, sums.exchanged_bytes
        held = laws.in_flight(depth=depth, stage=0, microbatches=m)

        moved_s = wiring.edge_latency_s + sums.least_boundary_bytes * wiring.edge_s_per_byte
        least_s = m * (float(sums.way_s[-1]) + moved_s) / held
        if laws.pipelined and laws.flushes:  # the shared weights' sum is after the last backward of the first stage
            filled_s = float(sums.way_s[-1]) / (1.0 - (1.0 - 1.0 / m) ** depth)
            least_s = max(least_s, filled_s) + self.model.tied_s(wiring)
        ring = wiring.exchange.slowest
        if shape.width > 1 and ring is not None:
            least_s = max(least_s, weights * wiring.ring_s_per_byte)

        step_s = max(total_s / depth, sums.block_s)
        there_and_back_s = total_s + wiring.edge_latency_s + mean_bytes * wiring.edge_s_per_byte
        batch_s = m * max(step_s, there_and_back_s / held, wiring.crossing * mean_bytes * wiring.port_s_per_byte)
        exchange_s = 0.0
        if shape.width > 1 and ring is not None:
            ring_s = weights / depth * ring.ring_s_per_byte
            exchange_s = wiring.exchange.seconds(weights / depth) + max(wiring.ring_stages - 1, 0.0) * ring_s
        if not laws.flushes:
            batch_s = max(batch_s, exchange_s)
        else:
            drain_s = there_and_back_s * (depth - 1) / depth if laws.pipelined else 0.0
            batch_s += drain_s + max(exchange_s - (drain_s + step_s) / 2, 0.0)
        samples = shape.batch_size
        return PlacedShape(
            space=self,
            shape=shape,
            wiring=wiring,
            most=min(most, samples / (least_s * (1 - _ROUNDING))) if least_s > 0 else most,
            likely=samples / batch_s if batch_s > 0 else inf,
        )
