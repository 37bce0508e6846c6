"""Datasheets: the vendors' peaks of devices, and the share of them that training reaches.

The datasheets known by name hold the vendors' peaks without sparsity. Memory and links are those of the known type
(`pipeplan.documents.devices`). The shares of A100s and H100s are fitted to measured iterations; other types have an
A100's. Multiprocessors are those of the same datasheets and whitepapers.

    v100-*      NVIDIA V100 datasheet (2020): SXM2 125 Tflop/s in tensor cores, 15.7 in float32, HBM2 900 GB/s; it has
                no bfloat16.
    a100-*      NVIDIA A100 datasheet (2021): SXM 312 Tflop/s, float32 19.5 (outside TF32, as PyTorch computes unless
                set otherwise), 1,555 GB/s with 40 GB and 2,039 GB/s with 80 GB.
    h100-*      NVIDIA H100 datasheet (2023): SXM 989.4 Tflop/s, float32 67, HBM3 3.35 TB/s; PCIe 756 Tflop/s,
                float32 51, 2.0 TB/s.
    h200-sxm    NVIDIA H200 datasheet (2024): an H100 SXM with memory at 4.8 TB/s.
    l4, t4      NVIDIA L4 (2023) 121 Tflop/s, float32 30.3, 300 GB/s; T4 (2018) 65 Tflop/s in float16, float32 8.1,
                320 GB/s.
    a10g        NVIDIA A10G (2021) 70 Tflop/s, float32 31.5, 600 GB/s.
    rtx-3090    NVIDIA Ampere GA102 whitepaper (2020): 71 Tflop/s with float32 accumulation, float32 35.6, 936 GB/s.
    rtx-4090    NVIDIA Ada whitepaper (2022): 165.2 Tflop/s with float32 accumulation, float32 82.6, 1,008 GB/s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.documents.names import STRICT
from pipeplan.documents.profile import DTYPE_BYTES, Device
from pipeplan.errors import require, require_amount, require_count

COMPUTE_EFFICIENCY = 0.78
MEMORY_EFFICIENCY = 0.71
ATTENTION_EFFICIENCY = 0.34
KERNEL_S = 5.9e-6
LAUNCH_S = 5e-5
"""These five are an A100's, fitted to training iterations of many models and degrees (docs/benchmarks.md)."""

FLOAT8 = "float8_e4m3fn"
"""Matrix products only: their operands and results have 16 bits."""

KINDS = ("gpu", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """One type of device. The peaks are the vendor's; the rest says how far training stays below them."""

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    """The peak of matrix products by dtype, without sparsity."""

    memory_bandwidth_bytes_per_s: float
    compute_efficiency: float = COMPUTE_EFFICIENCY
    """The share of the peak that a matrix product reaches at most."""

    memory_efficiency: float = MEMORY_EFFICIENCY
    """The share of the bandwidth that every operation reaches at most."""

    attention_efficiency: float = ATTENTION_EFFICIENCY
    """The share of the peak that attention in one kernel reaches at most."""

    kernel_s: float = 0.0
    """A kernel's own time to start and end."""

    launch_s: float = LAUNCH_S
    """The host's time to launch a kernel."""

    multiprocessors: int | None = None
    """They share out the tiles of a product. None: a product of any size reaches the same share."""

    kind: str = "gpu"
    """Whose kernels run: those of dropout and attention differ between GPU and CPU."""

    context_bytes: int = 0
    """As of a `Device`."""

    allocator_reserve: float = 0.0
    """As of a `Device`."""

    link_bandwidth_bytes_per_s: float | None = None
    """Of the link between neighbouring devices of a node, in one direction; only a cluster needs it."""

    link_latency_s: float = 0.0
    """Of the same link."""

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        self.device()
        require(bool(self.name.strip()), "name", "must not be empty", self.name)
        require(self.kind in KINDS, "kind", f"must be one of {', '.join(KINDS)}", self.kind)
        require(len(self.flops_per_s) > 0, "flops_per_s", "must hold at least one dtype", dict(self.flops_per_s))
        for dtype, rate in self.flops_per_s.items():
            rule = f"must be by dtype: {', '.join((*DTYPE_BYTES, FLOAT8))}"
            require(dtype in DTYPE_BYTES or dtype == FLOAT8, "flops_per_s", rule, dtype)
            require_amount(f"flops_per_s.{dtype}", rate, positive=True)
        require_amount("memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s, positive=True)
        for field in ("compute_efficiency", "memory_efficiency", "attention_efficiency"):
            require_amount(field, getattr(self, field), positive=True)
            require(getattr(self, field) <= 1, field, "must be at most 1", getattr(self, field))
        for field in ("kernel_s", "launch_s"):
            require_amount(field, getattr(self, field))
        if self.multiprocessors is not None:
            require_count("multiprocessors", self.multiprocessors)
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

    def peak_flops_per_s(self, dtype: str) -> float:
        """The peak of matrix products in this dtype. Raises InvalidInputError if the datasheet does not say."""
        rule = f"must hold {dtype}, in which a part of the model computes"
        require(dtype in self.flops_per_s, "flops_per_s", rule, sorted(self.flops_per_s))
        return self.flops_per_s[dtype]

    @property
    def reached_bytes_per_s(self) -> float:
        """The share of the memory's bandwidth that an operation reaches."""
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency


def _gpu(
    key: str,
    flops_per_s: Mapping[str, float],
    memory_bandwidth_bytes_per_s: float,
    multiprocessors: int,
    shares: tuple[float, float, float, float] = (COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, ATTENTION_EFFICIENCY, KERNEL_S),
) -> Datasheet:
    known = KNOWN_TYPES[key]
    compute, memory, attention, kernel_s = shares
    return Datasheet(
        name=known.device.name,
        memory_bytes=known.device.memory_bytes,
        flops_per_s=flops_per_s,
        memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
        context_bytes=known.device.context_bytes,
        allocator_reserve=known.device.allocator_reserve,
        link_bandwidth_bytes_per_s=known.link_bandwidth_bytes_per_s,
        link_latency_s=known.link_latency_s,
        multiprocessors=multiprocessors,
        compute_efficiency=compute,
        memory_efficiency=memory,
        attention_efficiency=attention,
        kernel_s=kernel_s,
    )


_HOPPER = (0.69, 0.52, 0.2, 2e-5)
"""An H100's shares, fitted like an A100's."""

_V100 = {"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12}
_A100 = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12}
_H100_SXM = {FLOAT8: 1978.9e12, "bfloat16": 989.4e12, "float16": 989.4e12, "float32": 67e12, "float64": 67e12}
_H100_PCIE = {FLOAT8: 1513e12, "bfloat16": 756e12, "float16": 756e12, "float32": 51e12, "float64": 51e12}
_L4 = {FLOAT8: 242.5e12, "bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12}
_T4 = {"float16": 65e12, "float32": 8.1e12}
_A10G = {"bfloat16": 70e12, "float16": 70e12, "float32": 31.5e12}
_RTX_3090 = {"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12}
_RTX_4090 = {"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12}

DATASHEETS: dict[str, Datasheet] = {
    "v100-16gb": _gpu("v100-16gb", _V100, 900e9, 80),
    "v100-32gb": _gpu("v100-32gb", _V100, 900e9, 80),
    "a100-40gb": _gpu("a100-40gb", _A100, 1555e9, 108),
    "a100-80gb": _gpu("a100-80gb", _A100, 2039e9, 108),
    "h100-sxm": _gpu("h100-sxm", _H100_SXM, 3350e9, 132, _HOPPER),
    "h100-pcie": _gpu("h100-pcie", _H100_PCIE, 2000e9, 114, _HOPPER),
    "h200-sxm": _gpu("h200-sxm", _H100_SXM, 4800e9, 132, _HOPPER),
    "l4": _gpu("l4", _L4, 300e9, 58),
    "t4": _gpu("t4", _T4, 320e9, 40),
    "a10g": _gpu("a10g", _A10G, 600e9, 80),
    "rtx-3090": _gpu("rtx-3090", _RTX_3090, 936e9, 82),
    "rtx-4090": _gpu("rtx-4090", _RTX_4090, 1008e9, 128),
}


def find_datasheet(name_or_file: str) -> Datasheet:
    """The datasheet of this name or in this file. Raises InvalidInputError if there is none, or a field is wrong."""
    if name_or_file in DATASHEETS:
        return DATASHEETS[name_or_file]
    rule = f"must be a datasheet's file, or one of {', '.join(sorted(DATASHEETS))}"
    require(Path(name_or_file).is_file(), "analytic", rule, name_or_file)
    from pipeplan.documents.files import read  # and pydantic, which datasheets known by name do without

    return read(Datasheet, Path(name_or_file))
