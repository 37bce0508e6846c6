"""Intervals: a profile at one microbatch size as tables over all intervals of blocks (`core.cost.compute` says how)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner_service.core.cost.compute import FloatArray, compute_s, interval_maxima, interval_sums, no_stage
from planner_service.core.cost.memory import Copies
from planner_service.core.cost.transfer import boundary_bytes
from planner_service.core.plan import StageMemory
from planner_service.core.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """What the closed forms are made of, on one type of device."""

    profile: Profile
    microbatch_size: int

    @cached_property
    def _measured(self) -> dict[str, FloatArray]:
        blocks = self.profile.at(self.microbatch_size)
        fields = ("input_bytes", "output_bytes", "activation_bytes", "workspace_bytes")
        return {name: np.asarray([getattr(block, name) for block in blocks], dtype=np.float64) for name in fields}

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.profile.blocks)

    @cached_property
    def weight_bytes(self) -> FloatArray:
        """One version of a stage's weights."""
        return interval_sums([block.weight_bytes for block in self.profile.blocks])

    @cached_property
    def activation_bytes(self) -> FloatArray:
        """What one microbatch keeps."""
        return interval_sums(self._measured["activation_bytes"].tolist())

    @cached_property
    def workspace_bytes(self) -> FloatArray:
        """The largest transient."""
        return interval_maxima(self._measured["workspace_bytes"].tolist())

    @cached_property
    def input_bytes(self) -> FloatArray:
        """What a stage that starts with each block keeps as its input."""
        return self._measured["input_bytes"]

    @cached_property
    def output_bytes(self) -> FloatArray:
        """What a stage that ends with each block sends on: nothing behind the last."""
        return np.append(self._measured["output_bytes"][:-1], 0.0)

    @cached_property
    def before_bytes(self) -> FloatArray:
        """What crosses the boundary before each block, both ways: nothing before the first."""
        return np.append(0.0, self.after_bytes[:-1])

    @cached_property
    def after_bytes(self) -> FloatArray:
        """What crosses the boundary behind each block, both ways: nothing behind the last."""
        return boundary_bytes(1.0) * self.output_bytes

    def compute_s(self, *, recompute: bool, recompute_factor: float | None) -> FloatArray:
        """Forward and backward a microbatch; infinite below the diagonal."""
        blocks = self.profile.at(self.microbatch_size)
        seconds = [compute_s(block, recompute=recompute, recompute_factor=recompute_factor) for block in blocks]
        return interval_sums(seconds) + no_stage(self.blocks)

    def memory_bytes(self, held: Copies) -> FloatArray:
        """What a worker of each stage holds."""
        total = held.weights * self.weight_bytes + held.activations * self.activation_bytes
        total += ((held.inputs + held.input_buffers) * self.input_bytes)[:, None]
        total += held.output_buffers * self.output_bytes + held.transients * self.workspace_bytes
        return np.asarray(total)

    def items(self, held: Copies, start: int, stop: int) -> StageMemory:
        """What a worker of one stage holds, by what it is."""
        here = start, stop - 1
        weights, activations = int(self.weight_bytes[here]), int(self.activation_bytes[here])
        inputs, outputs = int(self.input_bytes[start]), int(self.output_bytes[stop - 1])
        return StageMemory(
            weights=held.versions * weights,
            gradients=held.gradients * weights,
            master_weights=held.master_weights * weights,
            optimizer_states=held.optimizer_states * weights,
            activations=held.activations * activations + held.inputs * inputs,
            transient=held.transients * int(self.workspace_bytes[here]),
            buffers=held.input_buffers * inputs + held.output_buffers * outputs,
        )
