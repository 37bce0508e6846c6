"""Candidate: a shape with its best split into stages, by time, or by memory where none fits."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from planner_service.core.cost.compute import FloatArray
from planner_service.core.cost.memory import in_flight
from planner_service.core.errors import InvalidInputError
from planner_service.core.plan import Alternative, Stage
from planner_service.core.planner.complete import Decision
from planner_service.core.planner.pipeline_terms import UNPIPELINED, Links, PipelineTerms, Shape, orientations
from planner_service.core.planner.problem import Problem
from planner_service.core.planner.reasons import as_fast, shortfall, slower
from planner_service.core.planner.split import ROUNDING, Costs, Starts, least_sum, min_sum
from planner_service.core.planner.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A shape that fits: its orientation and its time. Where its stages end, `Evaluator.stops` says."""

    shape: Shape
    terms: PipelineTerms
    time_per_microbatch_s: float
    throughput_samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A shape that does not fit: the worst stage of the split that exceeds the device the least."""

    shape: Shape
    stage: int
    memory_bytes: int
    missing_bytes: int


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Finds the best split of shapes; what several of them need is computed once."""

    problem: Problem
    _tables: dict[int, Tables] = field(default_factory=dict)
    _compute_s: dict[tuple[int, bool], FloatArray] = field(default_factory=dict)
    _links: dict[tuple[int, int], tuple[Links, ...]] = field(default_factory=dict)

    def tables(self, microbatch_size: int) -> Tables:
        """The profile at this size."""
        if microbatch_size not in self._tables:
            measured = self.problem.profile.at(microbatch_size)
            self._tables[microbatch_size] = Tables(profile=self.problem.profile, measured=measured)
        return self._tables[microbatch_size]

    def compute_s(self, microbatch_size: int, recompute: bool) -> FloatArray:
        """Compute of all intervals, by size and recomputation."""
        key = (microbatch_size, recompute)
        if key not in self._compute_s:
            factor = self.problem.options.recompute_factor
            self._compute_s[key] = self.tables(microbatch_size).compute_s(recompute=recompute, recompute_factor=factor)
        return self._compute_s[key]

    def links(self, shape: Shape) -> tuple[Links, ...]:
        """The orientations that differ."""
        key = (shape.width, shape.depth)
        if key not in self._links:
            self._links[key] = orientations(self.problem.cluster, shape.width, shape.depth)
        return self._links[key]

    def terms(self, shape: Shape, links: Links) -> PipelineTerms:
        """The closed form of a shape on these links."""
        return PipelineTerms(
            shape=shape,
            links=links,
            tables=self.tables(shape.microbatch_size),
            compute_s=self.compute_s(shape.microbatch_size, shape.recompute),
            accounting=self.problem.options.memory,
            optimizer=self.problem.options.optimizer,
            device_bytes=self.problem.cluster.device.memory_bytes,
        )

    def least_time_s(self, shape: Shape) -> float:
        """No split of the shape takes less a microbatch: compute alone, spread evenly, and never less than a block."""
        compute_s = self.compute_s(shape.microbatch_size, shape.recompute)
        total_s = float(compute_s[0, -1])
        if shape.schedule in UNPIPELINED:
            return total_s
        return max(total_s / shape.depth, float(np.diagonal(compute_s).max())) * shape.slots

    def fastest(self, shape: Shape) -> Candidate | None:
        """The shape on the better orientation (the first if they are equal); None if no split fits."""
        options = [self.terms(shape, links) for links in self.links(shape)]
        if options[0].least_bytes() > self.problem.cluster.device.memory_bytes * (1 + ROUNDING):
            return None
        starts = options[0].fitting_starts()
        if starts is None:
            return None
        steps_s = [self._least_s(terms, starts) for terms in options]
        step_s = min(steps_s)
        return candidate(shape, options[steps_s.index(step_s)], step_s) if math.isfinite(step_s) else None

    def stops(self, found: Candidate) -> tuple[int, ...]:
        """Where the stages of its best split end."""
        terms = found.terms
        starts = terms.fitting_starts()
        if starts is None:
            return _existing(None, found.shape)
        if found.shape.schedule in UNPIPELINED:
            return _existing(min_sum(terms.fitting(terms.time_s), starts), found.shape)
        return _existing(terms.fastest(starts, self._about_s(found.shape)).min_max(), found.shape)

    def _least_s(self, terms: PipelineTerms, starts: Starts) -> float:
        """Its slowest stage at best, or all stages together without pipelining; infinite if nothing fits."""
        if terms.shape.schedule in UNPIPELINED:
            return least_sum(terms.fitting(terms.time_s), starts)
        return terms.fastest(starts, self._about_s(terms.shape)).least_max()

    def _about_s(self, shape: Shape) -> float:
        return self.least_time_s(shape) / shape.slots

    def nearest(self, shape: Shape) -> Miss:
        """By how much the best split in terms of memory exceeds the device."""
        terms = self.terms(shape, self.links(shape)[0])
        held_bytes = memory_by_stage(terms, _existing(terms.smallest().min_max(), shape))
        stage = held_bytes.index(max(held_bytes))
        return Miss(
            shape=shape,
            stage=stage,
            memory_bytes=held_bytes[stage],
            missing_bytes=held_bytes[stage] - self.problem.cluster.device.memory_bytes,
        )


def _existing(stops: tuple[int, ...] | None, shape: Shape) -> tuple[int, ...]:
    if stops is None:
        raise InvalidInputError("stages", "must be so many that a split exists", shape.depth)
    return stops


def candidate(shape: Shape, terms: PipelineTerms, step_s: float) -> Candidate:
    """The shape with this time of its slowest stage, or of all stages without pipelining."""
    time_s = step_s * shape.slots
    return Candidate(
        shape=shape,
        terms=terms,
        time_per_microbatch_s=time_s,
        throughput_samples_per_s=shape.throughput_samples_per_s(time_s),
    )


def _stages(found: Candidate, stops: tuple[int, ...]) -> Iterator[Stage]:
    times_s = time_by_stage(found.terms, stops)
    held_bytes = memory_by_stage(found.terms, stops)
    for start, stop, time_s, memory_bytes in zip((0, *stops[:-1]), stops, times_s, held_bytes, strict=True):
        yield Stage(
            start=start,
            stop=stop,
            replicas=found.shape.width,
            recompute=found.shape.recompute,
            time_s=time_s,
            memory_bytes=memory_bytes,
        )


def time_by_stage(terms: PipelineTerms, stops: tuple[int, ...]) -> list[float]:
    """Every stage's own time a microbatch."""
    return _by_stage(terms.time_s, stops)


def memory_by_stage(terms: PipelineTerms, stops: tuple[int, ...]) -> list[int]:
    """What a worker of each stage holds."""
    return [int(held) for held in _by_stage(terms.memory_bytes, stops)]


def _by_stage(costs: Costs, stops: tuple[int, ...]) -> list[float]:
    starts = (0, *stops[:-1])
    return [
        float(costs(stage, slice(start, start + 1), slice(stop - 1, stop))[0, 0])
        for stage, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def decision(
    planner: str,
    cost_model: str,
    chosen: Candidate,
    stops: tuple[int, ...],
    *,
    considered: int,
    alternatives: Iterable[Alternative],
) -> Decision:
    """What the planner says of the candidate that it chose."""
    shape = chosen.shape
    return Decision(
        planner=planner,
        cost_model=cost_model,
        stages=tuple(_stages(chosen, stops)),
        placement=chosen.terms.links.place((shape.width,) * shape.depth),
        schedule=shape.schedule,
        microbatch_size=shape.microbatch_size,
        microbatches=shape.microbatches,
        batch_size=shape.width * shape.microbatch_size * shape.microbatches,
        time_per_microbatch_s=chosen.time_per_microbatch_s,
        throughput_samples_per_s=chosen.throughput_samples_per_s,
        bubble_fraction=shape.bubble_fraction,
        optimal_in_flight=in_flight(shape.schedule, depth=shape.depth, stage=0, microbatches=shape.microbatches),
        configurations_considered=considered,
        alternatives=tuple(alternatives),
    )


def lost(found: Candidate, stops: tuple[int, ...], chosen: Candidate) -> Alternative:
    """It fits, but the chosen one is faster, or as fast and preferred."""
    rate = found.throughput_samples_per_s
    return _alternative(
        found.shape,
        slower(rate) if rate < chosen.throughput_samples_per_s else as_fast(rate),
        throughput_samples_per_s=rate,
        memory_bytes=max(memory_by_stage(found.terms, stops)),
    )


def too_large(miss: Miss) -> Alternative:
    """It does not fit."""
    return _alternative(miss.shape, shortfall(miss.stage, miss.missing_bytes), memory_bytes=miss.memory_bytes)


def ruled_out(shape: Shape, reason: str) -> Alternative:
    """It cannot run at all."""
    return _alternative(shape, reason)


def _alternative(
    shape: Shape, reason: str, *, throughput_samples_per_s: float | None = None, memory_bytes: int | None = None
) -> Alternative:
    return Alternative(
        schedule=shape.schedule,
        depth=shape.depth,
        width=shape.width,
        microbatch_size=shape.microbatch_size,
        microbatches=shape.microbatches,
        recompute=shape.recompute,
        throughput_samples_per_s=throughput_samples_per_s,
        memory_bytes=memory_bytes,
        reason=reason,
    )
