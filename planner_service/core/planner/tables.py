"""Tables: a profile at one microbatch size, over every interval of blocks (`cost.compute` says in which form)."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner_service.core.cost.compute import (
    BoolArray,
    FloatArray,
    compute_s,
    interval_maxima,
    interval_sums,
    no_stage,
)
from planner_service.core.cost.memory import Copies
from planner_service.core.cost.transfer import boundary_bytes
from planner_service.core.profile import Measurement, Profile


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the stages' closed forms are made of."""

    profile: Profile
    measured: tuple[Measurement, ...]
    _fits: dict[tuple[Copies, int], BoolArray | None] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.measured)

    @property
    def microbatch_size(self) -> int:
        """The size that the measurements are of."""
        return self.measured[0].microbatch_size

    @cached_property
    def weight_bytes(self) -> FloatArray:
        """One version of a stage's weights."""
        return interval_sums([block.weight_bytes for block in self.profile.blocks])

    @cached_property
    def boundary_bytes(self) -> FloatArray:
        """What crosses the boundary after each block but the last, both ways."""
        return np.asarray([boundary_bytes(block.output_bytes) for block in self.measured[:-1]], dtype=np.float64)

    @cached_property
    def _no_stage(self) -> FloatArray:
        return no_stage(self.blocks)

    @cached_property
    def _held_bytes(self) -> tuple[FloatArray, ...]:
        inputs = np.asarray([block.input_bytes for block in self.measured], dtype=np.float64)
        return (
            self.weight_bytes,
            interval_sums([block.activation_bytes for block in self.measured]),
            np.broadcast_to(inputs[:, None], (self.blocks, self.blocks)),
            interval_maxima([block.workspace_bytes for block in self.measured]),
        )

    @property
    def total_bytes(self) -> tuple[float, float]:
        """The whole model's weights and activations."""
        weights, activations = self._held_bytes[:2]
        return float(weights[0, -1]), float(activations[0, -1])

    def compute_s(self, *, recompute: bool = False, recompute_factor: float | None = None) -> FloatArray:
        """Seconds of compute a microbatch; infinite below the diagonal."""
        seconds = [compute_s(b, recompute=recompute, recompute_factor=recompute_factor) for b in self.measured]
        return interval_sums(seconds) + self._no_stage

    def memory_bytes(self, held: Copies, part: slice = slice(None)) -> FloatArray:
        """What a worker holds of a stage, for the intervals that begin and end in a part of the blocks."""
        weights, activations, inputs, transients = (table[part, part] for table in self._held_bytes)
        total = held.weights * weights + held.inputs * inputs + self._no_stage[part, part]
        if held.activations:
            total += held.activations * activations
        if held.transients:
            total += held.transients * transients
        return np.asarray(total)

    def fits(self, held: Copies, device_bytes: int) -> BoolArray | None:
        """Which stages fit a device; None for all. Asked for again and again, so it is kept."""
        key = (held, device_bytes)
        if key not in self._fits:
            memory_bytes = self.memory_bytes(held)
            largest = float(memory_bytes[0, -1] + held.inputs * self._held_bytes[2].max())
            self._fits[key] = None if largest <= device_bytes else memory_bytes <= device_bytes
        return self._fits[key]
