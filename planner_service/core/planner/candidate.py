"""Candidate: a shape with its best split into stages, by time, or by memory where none fits."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from planner_service.core.cost.compute import FloatArray
from planner_service.core.cost.memory import in_flight
from planner_service.core.errors import InvalidInputError
from planner_service.core.plan import Alternative, Stage
from planner_service.core.planner.complete import Decision
from planner_service.core.planner.pipeline_terms import UNPIPELINED, Links, PipelineTerms, Shape, orientations
from planner_service.core.planner.problem import Problem
from planner_service.core.planner.reasons import shortfall, slower
from planner_service.core.planner.split import Costs, min_max, min_sum
from planner_service.core.planner.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A shape that fits: its split, its orientation and its time."""

    shape: Shape
    terms: PipelineTerms
    stops: tuple[int, ...]
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
        """The best split on the better orientation (the first if they are equal); None if none fits."""
        search = min_sum if shape.schedule in UNPIPELINED else min_max
        best: Candidate | None = None
        for links in self.links(shape):
            terms = self.terms(shape, links)
            split = search(terms.fitting_s, shape.depth)
            if split is None:
                return None
            found = candidate(shape, terms, split.stops)
            if best is None or found.time_per_microbatch_s < best.time_per_microbatch_s:
                best = found
        return best

    def nearest(self, shape: Shape) -> Miss:
        """By how much the best split in terms of memory exceeds the device."""
        terms = self.terms(shape, self.links(shape)[0])
        split = min_max(terms.memory_bytes, shape.depth)
        if split is None:
            raise InvalidInputError("stages", f"must not be more than blocks ({terms.tables.blocks})", shape.depth)
        held_bytes = memory_by_stage(terms, split.stops)
        stage = held_bytes.index(max(held_bytes))
        return Miss(
            shape=shape,
            stage=stage,
            memory_bytes=held_bytes[stage],
            missing_bytes=held_bytes[stage] - self.problem.cluster.device.memory_bytes,
        )


def candidate(shape: Shape, terms: PipelineTerms, stops: tuple[int, ...]) -> Candidate:
    """The shape split there: the slowest stage counts, or all stages without pipelining."""
    times_s = _by_stage(terms.time_s, stops)
    step_s = sum(times_s) if shape.schedule in UNPIPELINED else max(times_s)
    time_s = step_s * shape.slots
    return Candidate(
        shape=shape,
        terms=terms,
        stops=stops,
        time_per_microbatch_s=time_s,
        throughput_samples_per_s=shape.throughput_samples_per_s(time_s),
    )


def stages_of(found: Candidate) -> tuple[Stage, ...]:
    """The stages with their own time and memory."""
    starts = (0, *found.stops[:-1])
    times_s = _by_stage(found.terms.time_s, found.stops)
    held_bytes = memory_by_stage(found.terms, found.stops)
    return tuple(
        Stage(
            start=start,
            stop=stop,
            replicas=found.shape.width,
            recompute=found.shape.recompute,
            time_s=time_s,
            memory_bytes=memory_bytes,
        )
        for start, stop, time_s, memory_bytes in zip(starts, found.stops, times_s, held_bytes, strict=True)
    )


def memory_by_stage(terms: PipelineTerms, stops: tuple[int, ...]) -> list[int]:
    """What a worker of each stage holds."""
    return [int(held) for held in _by_stage(terms.memory_bytes, stops)]


def _by_stage(costs: Costs, stops: tuple[int, ...]) -> list[float]:
    starts = (0, *stops[:-1])
    return [
        float(costs(stage)[start - stage, stop - stage - 1])
        for stage, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def decision(
    planner: str, cost_model: str, chosen: Candidate, *, considered: int, alternatives: Iterable[Alternative]
) -> Decision:
    """What the planner says of the candidate that it chose."""
    shape = chosen.shape
    return Decision(
        planner=planner,
        cost_model=cost_model,
        stages=stages_of(chosen),
        placement=chosen.terms.links.placement,
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


def lost(found: Candidate) -> Alternative:
    """It fits, but another is faster (or as fast and preferred)."""
    return _alternative(
        found.shape,
        slower(found.throughput_samples_per_s),
        throughput_samples_per_s=found.throughput_samples_per_s,
        memory_bytes=max(memory_by_stage(found.terms, found.stops)),
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
