"""Kinds: what a stage's time and memory depend on besides its blocks, and the tables over all intervals of blocks.

Everything that the solver is told of times and bytes is here: the closed forms of `core.cost`, a table a kind of stage,
with the better of recomputing and not recomputing in every entry. Tables are those of `core.cost.compute`: entry [i, j]
is the stage [i, j + 1), and infinity stands where there is none.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner_service.core.cost.all_reduce import EXCHANGES
from planner_service.core.cost.compute import BoolArray, FloatArray
from planner_service.core.cost.memory import Copies, copies, keeps_master_weights, paper_copies, training_copies
from planner_service.core.plan import StageMemory
from planner_service.core.planner.problem import Options, Problem
from planner_service.core.profile import Device
from planner_service.solvers.intervals import Intervals

PIPEDREAM = "pipedream"
FLUSHED = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is searched at once. `width` is None where every stage has replicas of its own: PipeDream."""

    schedule: str
    depth: int
    width: int | None
    microbatch_size: int
    microbatches: int

    @property
    def slots(self) -> float:
        """A microbatch's time in steps of the slowest stage: a flush adds the filling and draining."""
        if self.schedule in FLUSHED:
            return (self.microbatches + self.depth - 1) / self.microbatches
        return 1.0

    @property
    def bubble_fraction(self) -> float:
        """The share of idle time among equal stages."""
        return 1.0 - 1.0 / self.slots

    @property
    def samples(self) -> int:
        """Samples that are through after a step of the slowest stage: all pipelines' together."""
        return self.microbatch_size * (self.width or 1)

    def sample_s(self, step_s: float) -> float:
        """Seconds a sample, if the slowest stage takes these seconds a microbatch."""
        return step_s * self.slots / self.samples

    def step_s(self, sample_s: float) -> float:
        """The reverse."""
        return sample_s * self.samples / self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A stage's place: its type of device, its replicas, and the bandwidths among them and across its boundaries.

    `stage` counts from 0; `workers` are those from this stage on, itself included, where replicas differ.
    """

    stage: int
    type: int
    replicas: int
    workers: int
    own: float
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An interval on a kind of stage as it will run."""

    recompute: bool
    time_s: float
    memory: StageMemory


@dataclass(frozen=True, kw_only=True)
class Tabulated:
    """The tables of one problem at one microbatch size."""

    problem: Problem
    microbatch_size: int

    @property
    def options(self) -> Options:
        """What was asked."""
        return self.problem.options

    @cached_property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.problem.profile.blocks)

    @cached_property
    def types(self) -> tuple[Device, ...]:
        """The types of devices."""
        return self.problem.cluster.types

    @cached_property
    def intervals(self) -> tuple[Intervals, ...]:
        """The profiles on the types."""
        named = [device.name if len(self.types) > 1 else None for device in self.types]
        size = self.microbatch_size
        return tuple(Intervals(profile=self.problem.profile_on(name), microbatch_size=size) for name in named)

    @cached_property
    def recomputes(self) -> tuple[bool, ...]:
        """The choices that a stage has."""
        asked = self.options.recompute
        return (False, True) if asked is None else (asked,)

    @cached_property
    def _compute_s(self) -> dict[tuple[int, bool], FloatArray]:
        factor = self.options.recompute_factor
        return {
            (index, recompute): intervals.compute_s(recompute=recompute, recompute_factor=factor)
            for index, intervals in enumerate(self.intervals)
            for recompute in self.recomputes
        }

    def compute_s(self, kind_type: int) -> FloatArray:
        """The least compute of all intervals on a type of device."""
        return np.asarray(np.minimum.reduce([self._compute_s[kind_type, way] for way in self.recomputes]))

    @cached_property
    def may_be_stage(self) -> BoolArray:
        """Which intervals the forced and the forbidden cuts leave."""
        fine = np.tri(self.blocks, dtype=bool).T
        for cut in self.options.forbidden_cuts:
            fine[cut, :] = False
            fine[:, cut - 1] = False
        for cut in self.options.forced_cuts:
            fine[:cut, cut:] = False
        return fine

    def time_s(self, shape: Shape, kind: Kind) -> FloatArray:
        """A stage's time a microbatch, infinite where it does not fit or may not be."""
        return self._better([self._fitting_s(shape, kind, recompute) for recompute in self.recomputes])

    def excess_bytes(self, shape: Shape, kind: Kind) -> FloatArray:
        """By how much a stage exceeds its device (below 0: what is left); infinite where it may not be."""
        usable = self.types[kind.type].usable_bytes
        return self._better([self._held(shape, kind, recompute) - usable for recompute in self.recomputes])

    def _better(self, tables: list[FloatArray]) -> FloatArray:
        return np.where(self.may_be_stage, np.minimum.reduce(tables), np.inf)

    def choice(self, shape: Shape, kind: Kind, start: int, stop: int) -> Choice:
        """The faster way to run a stage that fits; without recomputation if both are as fast, or if neither fits."""
        here = start, stop - 1
        ways = [
            Choice(
                recompute=recompute,
                time_s=float(self._time_s(shape, kind, recompute)[here]),
                memory=self.intervals[kind.type].items(self._copies(shape, kind, recompute), start, stop),
            )
            for recompute in self.recomputes
        ]
        usable = self.types[kind.type].usable_bytes
        fitting = [way for way in ways if way.memory.total <= usable]
        if fitting:
            return min(fitting, key=lambda way: (way.time_s, way.recompute))
        return min(ways, key=lambda way: (way.memory.total, way.recompute))

    def _fitting_s(self, shape: Shape, kind: Kind, recompute: bool) -> FloatArray:
        fits = self._held(shape, kind, recompute) <= self.types[kind.type].usable_bytes
        return np.where(fits, self._time_s(shape, kind, recompute), np.inf)

    def _time_s(self, shape: Shape, kind: Kind, recompute: bool) -> FloatArray:
        compute_s = self._compute_s[kind.type, recompute]
        intervals = self.intervals[kind.type]
        before_s = intervals.before_bytes[:, None] / kind.before
        after_s = intervals.after_bytes / kind.after
        exchange_s = self._exchange_share(shape, kind) * intervals.weight_bytes / kind.own
        if shape.width is None:
            stage_s = np.maximum(compute_s, exchange_s) / kind.replicas
            return np.asarray(np.maximum(stage_s, np.maximum(before_s, after_s)))
        return np.asarray(np.maximum(compute_s + before_s + after_s, exchange_s / shape.microbatches))

    def _exchange_share(self, shape: Shape, kind: Kind) -> float:
        default = "parameter-server" if shape.width is None else "all-reduce"
        law = EXCHANGES[self.options.synchronisation or default]
        return float(law(np.asarray(float(kind.replicas))))

    def _held(self, shape: Shape, kind: Kind, recompute: bool) -> FloatArray:
        return self.intervals[kind.type].memory_bytes(self._copies(shape, kind, recompute))

    def _copies(self, shape: Shape, kind: Kind, recompute: bool) -> Copies:
        options, dtype = self.options, self.problem.profile.dtype
        masters = keeps_master_weights(dtype, options.master_weights)
        if shape.width is not None:
            return copies(
                options.memory,
                shape.schedule,
                options.optimizer,
                recompute=recompute,
                depth=shape.depth,
                stage=kind.stage,
                microbatches=shape.microbatches,
                dtype=dtype,
                master_weights=masters,
                replicas=kind.replicas,
            )
        held = -(-kind.workers // kind.replicas)
        if options.memory == "paper":
            return paper_copies(PIPEDREAM, recompute=recompute, depth=held, microbatches=1)
        return training_copies(
            PIPEDREAM, options.optimizer, recompute=recompute, held=held, dtype=dtype, master_weights=masters
        )
