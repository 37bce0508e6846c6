"""Datasheet: what a device can do at most by its vendor, and the share of it that training reaches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pipeplan.documents.profile import DTYPE_BYTES, STRICT, Device
from pipeplan.errors import require, require_amount

COMPUTE_EFFICIENCY = 0.7
MEMORY_EFFICIENCY = 0.5
LAUNCH_S = 52e-6
"""The three are fitted to training iterations that were measured on A100s, launched by Python (docs/benchmarks.md).

The fit took the measured program to keep its activations; it recomputed every layer. The three are about 30 % too slow.
"""

KINDS = ("gpu", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """One type of device. The peaks are the vendor's; the rest says how far training stays below them.

    `flops_per_s` holds the peak of matrix products by dtype, without sparsity. `compute_efficiency` is the share of it,
    `memory_efficiency` the share of the bandwidth, that an operation reaches. `launch_s` is what the host needs to
    launch an operation. `kind` says whose kernels run: dropout and attention have others on a GPU than on a CPU.
    `context_bytes` and `allocator_reserve` are a Device's. The link is the one between neighbouring devices of a node,
    in one direction; it is needed only where a cluster is to be written.
    """

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    compute_efficiency: float = COMPUTE_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY
    launch_s: float = LAUNCH_S
    kind: str = "gpu"
    context_bytes: int = 0
    allocator_reserve: float = 0.0
    link_bandwidth_bytes_per_s: float | None = None
    link_latency_s: float = 0.0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        self.device()
        require(bool(self.name.strip()), "name", "must not be empty", self.name)
        require(self.kind in KINDS, "kind", f"must be one of {', '.join(KINDS)}", self.kind)
        require(len(self.flops_per_s) > 0, "flops_per_s", "must hold at least one dtype", dict(self.flops_per_s))
        for dtype, rate in self.flops_per_s.items():
            require(dtype in DTYPE_BYTES, "flops_per_s", f"must be by dtype: {', '.join(DTYPE_BYTES)}", dtype)
            require_amount(f"flops_per_s.{dtype}", rate, positive=True)
        require_amount("memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s, positive=True)
        for field in ("compute_efficiency", "memory_efficiency"):
            require_amount(field, getattr(self, field), positive=True)
            require(getattr(self, field) <= 1, field, "must be at most 1", getattr(self, field))
        require_amount("launch_s", self.launch_s)
        if self.link_bandwidth_bytes_per_s is not None:
            require_amount("link_bandwidth_bytes_per_s", self.link_bandwidth_bytes_per_s, positive=True)
        require_amount("link_latency_s", self.link_latency_s)

    def device(self) -> Device:
        """The device as profiles and clusters describe it."""
        return Device(
            name=self.name,
            memory_bytes=self.memory_bytes,
            context_bytes=self.context_bytes,
            allocator_reserve=self.allocator_reserve,
        )

    def reached_flops_per_s(self, dtype: str) -> float:
        """What a matrix product in this dtype reaches. Raises InvalidInputError if the datasheet does not say."""
        rule = f"must hold {dtype}, in which a part of the model computes"
        require(dtype in self.flops_per_s, "flops_per_s", rule, sorted(self.flops_per_s))
        return self.flops_per_s[dtype] * self.compute_efficiency

    @property
    def reached_bytes_per_s(self) -> float:
        """What an operation reaches of the memory's bandwidth."""
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency
