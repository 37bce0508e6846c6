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
from planner_service.core.planner.split import ROUNDING
from planner_service.core.profile import Measurement, Profile


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the stages' closed forms are made of."""

    profile: Profile
    measured: tuple[Measurement, ...]
    _held_sums: dict[tuple[int, int], list[float]] = field(default_factory=dict)

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

    def memory_bytes(self, held: Copies, starts: slice = slice(None), lasts: slice = slice(None)) -> FloatArray:
        """What a worker holds of a stage, for the intervals that begin and end in these ranges."""
        weights, activations, inputs, transients = (table[starts, lasts] for table in self._held_bytes)
        total = held.weights * weights + held.inputs * inputs + self._no_stage[starts, lasts]
        if held.activations:
            total += held.activations * activations
        if held.transients:
            total += held.transients * transients
        return np.asarray(total)

    def held_sums(self, held: Copies) -> list[float]:
        """What a worker holds at least of the blocks [0, i), for every i: weights and activations. Kept."""
        key = (held.weights, held.activations)
        if key not in self._held_sums:
            weights, activations = (table[0] for table in self._held_bytes[:2])
            self._held_sums[key] = [0.0, *(held.weights * weights + held.activations * activations).tolist()]
        return self._held_sums[key]

    def all_fit(self, held: Copies, device_bytes: int) -> bool:
        """Whether a device holds any stage, by a bound on all of them."""
        transients = self._held_bytes[3]
        largest = self.held_sums(held)[-1] + held.inputs * self._largest_input + held.transients * transients[0, -1]
        return bool(largest * (1 + ROUNDING) <= device_bytes)

    @cached_property
    def _largest_input(self) -> float:
        return float(max(block.input_bytes for block in self.measured))

    def fits(self, held: Copies, device_bytes: int) -> BoolArray | None:
        """Which stages fit a device; None for all."""
        return None if self.all_fit(held, device_bytes) else self.memory_bytes(held) <= device_bytes
