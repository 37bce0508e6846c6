"""Kinds: a stage's place, with tables of its time and memory over all intervals of blocks.

The solver knows times and bytes only from these tables: the closed forms of `costs`, one table for each kind of stage.
`Intervals` are the sums over a profile at one microbatch size. `Tabulated` turns them into times and bytes; each entry
is the better of recomputing and not recomputing.

Tables are those of `costs.compute`: entry [i, j] is the stage [i, j + 1), and infinity stands where there is none.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.arrays import BoolArray, FloatArray
from pipeplan.costs.collectives import EXCHANGES
from pipeplan.costs.compute import compute_s, interval_maxima, interval_sums, no_stage
from pipeplan.costs.memory import (
    Copies,
    copies,
    keeps_master_weights,
    paper_copies,
    passed_inputs,
    replacing_bytes,
    training_copies,
)
from pipeplan.costs.transfer import boundary_bytes
from pipeplan.documents.plan import RECOMPUTE_UNITS
from pipeplan.documents.profile import Device, Profile
from pipeplan.documents.stage_memory import StageMemory
from pipeplan.planners.problem import Options, PlanningProblem, recompute_units
from pipeplan.programs.schedule import Schedule
from pipeplan.schedules.registry import schedule_named


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The terms of the closed forms on one type of device: a profile's sums over all intervals of blocks."""

    profile: Profile
    microbatch_size: int

    @cached_property
    def _measured(self) -> dict[str, FloatArray]:
        blocks = self.profile.at(self.microbatch_size)
        moved = ("input_bytes", "output_bytes", "kept_output_bytes")
        fields = (*moved, "activation_bytes", "added_bytes", "again_bytes", "workspace_bytes")
        return {name: np.asarray([getattr(block, name) for block in blocks], dtype=np.float64) for name in fields}

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.profile.blocks)

    @cached_property
    def weight_bytes(self) -> FloatArray:
        """The bytes of one version of a stage's trained weights."""
        return interval_sums([block.trained_bytes for block in self.profile.blocks])

    @cached_property
    def untrained_bytes(self) -> FloatArray:
        """The bytes of which a worker holds one copy: frozen weights and buffers."""
        return interval_sums([block.untrained_bytes for block in self.profile.blocks])

    @cached_property
    def activation_bytes(self) -> FloatArray:
        """The bytes that one microbatch keeps: `costs.memory.kept_bytes`."""
        added = self._measured["added_bytes"]
        return interval_sums(added.tolist()) + (self._measured["activation_bytes"] - added)[:, None]

    def late_bytes(self, gradients: int) -> FloatArray:
        """The bytes of `gradients` gradients beyond a microbatch's activations: `costs.memory.replacing_bytes`."""
        weights = np.asarray([block.trained_bytes for block in self.profile.blocks], dtype=np.float64)
        return interval_sums(replacing_bytes(gradients, weights, self._measured["added_bytes"]).tolist())

    @cached_property
    def workspace_bytes(self) -> FloatArray:
        """The largest transient of a block."""
        return interval_maxima(self._measured["workspace_bytes"].tolist())

    @cached_property
    def block_input_bytes(self) -> FloatArray:
        """The inputs of all blocks of a stage, without what blocks only forward."""
        passed = np.asarray(passed_inputs(self.profile.at(self.microbatch_size)), dtype=np.float64)
        return interval_sums((self.input_bytes - passed).tolist()) + passed[:, None]

    @cached_property
    def again_bytes(self) -> FloatArray:
        """The largest bytes of a block when it has run again."""
        return interval_maxima(self._measured["again_bytes"].tolist())

    @cached_property
    def input_bytes(self) -> FloatArray:
        """The bytes that a stage starting with each block keeps as its input."""
        return self._measured["input_bytes"]

    @cached_property
    def output_bytes(self) -> FloatArray:
        """The bytes that a stage ending with each block sends on: none after the last."""
        return np.append(self._measured["output_bytes"][:-1], 0.0)

    @cached_property
    def kept_output_bytes(self) -> FloatArray:
        """The part of them among the stage's activations (`Measurement.kept_output_bytes`)."""
        return np.append(self._measured["kept_output_bytes"][:-1], 0.0)

    @cached_property
    def before_bytes(self) -> FloatArray:
        """The bytes across the boundary before each block, both ways: none before the first."""
        return np.append(0.0, self.after_bytes[:-1])

    @cached_property
    def after_bytes(self) -> FloatArray:
        """The bytes across the boundary after each block, both ways: none after the last."""
        return boundary_bytes(1.0) * self.output_bytes

    def compute_s(self, *, recompute: bool, recompute_factor: float | None) -> FloatArray:
        """Forward and backward a microbatch; infinite below the diagonal."""
        blocks = self.profile.at(self.microbatch_size)
        seconds = [compute_s(block, recompute=recompute, recompute_factor=recompute_factor) for block in blocks]
        return interval_sums(seconds) + no_stage(self.blocks)

    def memory_bytes(self, held: Copies) -> FloatArray:
        """The bytes that a worker of each stage holds."""
        total = held.weights * self.weight_bytes + self.untrained_bytes + held.activations * self.activation_bytes
        total += (held.inputs * self.input_bytes)[:, None] + held.transients * self.workspace_bytes
        total += held.buffer_bytes(self.input_bytes[:, None], self.output_bytes, self.kept_output_bytes)
        if held.late_gradients:
            total += self.late_bytes(held.late_gradients)
        if held.block_inputs:
            total += held.block_inputs * self.block_input_bytes + held.blocks_again * self.again_bytes
        return np.asarray(total)

    def items(self, held: Copies, start: int, stop: int) -> StageMemory:
        """The bytes that a worker of one stage holds, by item."""
        here = start, stop - 1
        weights, activations = int(self.weight_bytes[here]), int(self.activation_bytes[here])
        inputs = int(self.input_bytes[start])
        moved = inputs, int(self.output_bytes[stop - 1]), int(self.kept_output_bytes[stop - 1])
        kept = held.activations * activations + held.inputs * inputs
        kept += held.block_inputs * int(self.block_input_bytes[here])
        kept += held.blocks_again * int(self.again_bytes[here])
        return StageMemory(
            weights=int(held.stored * weights) + int(self.untrained_bytes[here]),
            gradients=held.gradients * weights + int(self.late_bytes(held.late_gradients)[here]),
            master_weights=held.master_weights * weights,
            optimizer_states=held.optimizer_states * weights,
            activations=kept,
            transient=held.transients * int(self.workspace_bytes[here]),
            buffers=held.buffer_bytes(*moved),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """All but the cuts. `width` is None if every stage has its own number of replicas, as in PipeDream."""

    schedule: str
    depth: int
    width: int | None
    microbatch_size: int
    microbatches: int

    @property
    def laws(self) -> Schedule:
        """The schedule's laws."""
        return schedule_named(self.schedule)

    @property
    def slots(self) -> float:
        """A microbatch's time in steps of the slowest stage: a flush adds filling and draining."""
        if self.laws.flushes:
            return (self.microbatches + self.depth - 1) / self.microbatches
        return 1.0

    @property
    def bubble_fraction(self) -> float:
        """The share of idle time among equal stages."""
        return 1.0 - 1.0 / self.slots

    @property
    def samples(self) -> int:
        """Samples that a step of the slowest stage completes, on all pipelines together."""
        return self.microbatch_size * (self.width or 1)

    def sample_s(self, step_s: float) -> float:
        """Seconds a sample, from the slowest stage's seconds a microbatch."""
        return step_s * self.slots / self.samples

    def step_s(self, sample_s: float) -> float:
        """The slowest stage's seconds a microbatch, from seconds a sample."""
        return sample_s * self.samples / self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """A stage's place: its type of device, its replicas, and the bandwidths among them and across its boundaries.

    `stage` counts from 0. `workers` counts those of this stage and all after it, where replicas differ.
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
    unit: str
    time_s: float
    memory: StageMemory


@dataclass(frozen=True, kw_only=True)
class Tabulated:
    """The tables of one problem at one microbatch size, where `reserved_bytes` of every device stay free."""

    problem: PlanningProblem
    microbatch_size: int
    reserved_bytes: float = 0.0

    @property
    def options(self) -> Options:
        """The request's options."""
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
        """Which intervals the forced and the forbidden cuts allow."""
        fine = np.tri(self.blocks, dtype=bool).T
        for cut in self.options.forbidden_cuts:
            fine[cut, :] = False
            fine[:, cut - 1] = False
        for cut in self.options.forced_cuts:
            fine[:cut, cut:] = False
        return fine

    def time_s(self, shape: StageShape, kind: StageKind) -> FloatArray:
        """A stage's time a microbatch, infinite where it does not fit or may not be."""
        usable = self.types[kind.type].usable_bytes - self.reserved_bytes
        tables = [
            np.where(self._held(shape, kind, recompute) <= usable, self._time_s(shape, kind, recompute), np.inf)
            for recompute in self.recomputes
        ]
        return self._better(tables)

    def excess_bytes(self, shape: StageShape, kind: StageKind) -> FloatArray:
        """The bytes by which a stage exceeds its device, negative if it fits; infinite where no stage may be."""
        usable = self.types[kind.type].usable_bytes - self.reserved_bytes
        return self._better([self._held(shape, kind, recompute) - usable for recompute in self.recomputes])

    def choice(self, shape: StageShape, kind: StageKind, start: int, stop: int) -> Choice:
        """The faster mode of a stage that fits; without recomputation if both are as fast, or if neither fits.

        The unit of recomputation is the first that fits.
        """
        here = start, stop - 1
        ways = [
            Choice(
                recompute=recompute,
                unit=unit,
                time_s=float(self._time_s(shape, kind, recompute)[here]),
                memory=self.intervals[kind.type].items(self._copies(shape, kind, recompute, unit), start, stop),
            )
            for recompute in self.recomputes
            for unit in self._units(shape, recompute)
        ]
        usable = self.types[kind.type].usable_bytes - self.reserved_bytes
        fitting = [way for way in ways if way.memory.total <= usable]
        if fitting:
            return min(fitting, key=lambda way: (way.time_s, way.recompute))
        return min(ways, key=lambda way: (way.memory.total, way.recompute))

    def _units(self, shape: StageShape, recompute: bool) -> tuple[str, ...]:
        """The units of recomputation; one that stands for none where nothing is recomputed."""
        return recompute_units(self.problem, shape.laws) if recompute else RECOMPUTE_UNITS[:1]

    def _better(self, tables: list[FloatArray]) -> FloatArray:
        return np.where(self.may_be_stage, np.minimum.reduce(tables), np.inf)

    def _time_s(self, shape: StageShape, kind: StageKind, recompute: bool) -> FloatArray:
        """By PipeDream's law if every stage has its own number of replicas, by 2BW's (appendix A.1.1) if all have the
        same.
        """
        compute_s = self._compute_s[kind.type, recompute]
        intervals = self.intervals[kind.type]
        before_s = intervals.before_bytes[:, None] / kind.before
        after_s = intervals.after_bytes / kind.after
        law = EXCHANGES[self.options.synchronisation or "all-reduce"]
        exchange_s = float(law(np.asarray(float(kind.replicas)))) * intervals.weight_bytes / kind.own
        if shape.width is None:
            stage_s = np.maximum(compute_s, exchange_s) / kind.replicas
            return np.asarray(np.maximum(stage_s, np.maximum(before_s, after_s)))
        return np.asarray(np.maximum(compute_s + before_s + after_s, exchange_s / shape.microbatches))

    def _held(self, shape: StageShape, kind: StageKind, recompute: bool) -> FloatArray:
        """The bytes by the unit that holds least."""
        copies_of_units = (self._copies(shape, kind, recompute, unit) for unit in self._units(shape, recompute))
        return np.asarray(np.minimum.reduce([self.intervals[kind.type].memory_bytes(c) for c in copies_of_units]))

    def _copies(self, shape: StageShape, kind: StageKind, recompute: bool, unit: str) -> Copies:
        options, dtype = self.options, self.problem.profile.dtype
        masters = keeps_master_weights(dtype, options.master_weights)
        if shape.width is not None:
            return copies(
                options.memory,
                shape.laws,
                options.optimizer_or_default,
                recompute=recompute,
                depth=shape.depth,
                stage=kind.stage,
                microbatches=shape.microbatches,
                dtype=dtype,
                master_weights=masters,
                replicas=kind.replicas,
                unit=unit,
                autocast=self.problem.profile.autocast,
            )
        held = -(-kind.workers // kind.replicas)
        if options.memory == "paper":
            return paper_copies(shape.laws, recompute=recompute, depth=held, microbatches=1)
        return training_copies(
            shape.laws,
            options.optimizer_or_default,
            recompute=recompute,
            held=held,
            dtype=dtype,
            microbatches=shape.microbatches,
            master_weights=masters,
            unit=unit,
            autocast=self.problem.profile.autocast,
        )
