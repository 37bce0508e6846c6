"""Datasheets: the vendors' peaks of devices, and the share of them that kernels reach.

Peaks of datasheets known by name are without sparsity (sources: DATASHEETS). Memory and links are those of the known
type (`pipeplan.documents.devices`). Multiprocessors are those of the same datasheets and whitepapers.

The shares of MEASURED types are fitted to single products and attention kernels on these GPUs
(ai-dynamo/aiconfigurator, NVIDIA, Apache-2.0) by `python -m benchmarks.kernels`, which prints how far they are off. The
H800 and the A800 are an H100 and an A100 with slower links. Other types have the shares of a similar measured type:
their errors are not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.documents.names import STRICT
from pipeplan.documents.profile import DTYPE_BYTES, Device
from pipeplan.errors import InvalidInputError, require, require_amount, require_count

COMPUTE_EFFICIENCY = 0.78
MEMORY_EFFICIENCY = 0.85
ATTENTION_EFFICIENCY = 0.34
LAUNCH_S = 5e-5
"""The defaults of a user's datasheet. Streams of copies and sums reach 85 to 90 % of the bandwidth
of A100s and H100s (BabelStream's published results); no elementwise kernel of other types was measured here.
"""

FLOAT8 = "float8_e4m3fn"
FLOAT4 = "float4_e2m1fn_x2"
NARROW = (FLOAT8, FLOAT4)
"""Matrix products only: their results have 16 bits."""

KINDS = ("gpu", "cpu")


def _require_share(name: str, value: float) -> None:
    require_amount(name, value, positive=True)
    require(value <= 1, name, "must be at most 1", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShares:
    """How far matrix products of one dtype stay below the peak (`kernels` says how the numbers are used).

    `efficiency` is the share of the peak that a large product reaches. A tile starts and ends as long as it computes
    `start_depth` of the inner dimension. `tile_reads` is the part of the largest tile's time that grows with the reads
    of smaller ones.
    """

    efficiency: float = COMPUTE_EFFICIENCY
    start_depth: float = 32.0
    tile_reads: float = 0.3

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        _require_share("efficiency", self.efficiency)
        require_amount("start_depth", self.start_depth)
        require_amount("tile_reads", self.tile_reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """One type of device: the vendor's peaks, and the shares of them that training reaches.

    - `flops_per_s`: the peak of matrix products by dtype, without sparsity.
    - `compute_efficiency`: the largest share of the peak that a product reaches, in a dtype that `products` does not
      name; `products` has measured shares by dtype.
    - `memory_efficiency`: the largest share of the bandwidth that an operation reaches; `product_memory_efficiency`:
      the same of products, whose reads and writes are less even (None: `memory_efficiency`).
    - `attention_efficiency`: the largest share of the peak that attention in one kernel reaches, half of it at
      `attention_half_length` keys (0: every length reaches it); `attention_start_s`: its time to start and end
      in addition to `kernel_s`, which is that of any kernel. `launch_s`: the host's time to launch one.
    - `multiprocessors` share out the tiles of a product; None: a product of any size reaches the same share.
    - `kind`: GPU or CPU; their kernels of dropout and attention differ.
    - `context_bytes`, `allocator_reserve`: as of a `Device`.
    - `sustained`: the share of the speed of single kernels that those of a long job reach: power and heat slow them
      down. `measured`: whether the shares are fitted to kernels on this type.
    - `link_...`: of the link between neighbouring devices of a node, in one direction; only a cluster needs it.
    """

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    compute_efficiency: float = COMPUTE_EFFICIENCY
    products: Mapping[str, ProductShares] = field(default_factory=dict)
    memory_efficiency: float = MEMORY_EFFICIENCY
    product_memory_efficiency: float | None = None
    attention_efficiency: float = ATTENTION_EFFICIENCY
    attention_start_s: float = 0.0
    attention_half_length: float = 0.0
    kernel_s: float = 0.0
    launch_s: float = LAUNCH_S
    multiprocessors: int | None = None
    kind: str = "gpu"
    context_bytes: int = 0
    allocator_reserve: float = 0.0
    sustained: float = 1.0
    measured: bool = False
    link_bandwidth_bytes_per_s: float | None = None
    link_latency_s: float = 0.0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        self.device()
        require(bool(self.name.strip()), "name", "must not be empty", self.name)
        require(self.kind in KINDS, "kind", f"must be one of {', '.join(KINDS)}", self.kind)
        require(len(self.flops_per_s) > 0, "flops_per_s", "must hold at least one dtype", dict(self.flops_per_s))
        for dtype, rate in self.flops_per_s.items():
            rule = f"must be by dtype: {', '.join((*DTYPE_BYTES, *NARROW))}"
            require(dtype in DTYPE_BYTES or dtype in NARROW, "flops_per_s", rule, dtype)
            require_amount(f"flops_per_s.{dtype}", rate, positive=True)
        unknown = sorted(self.products.keys() - self.flops_per_s.keys())
        require(not unknown, "products", "must be of dtypes in flops_per_s", unknown)
        require_amount("memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s, positive=True)
        for name in ("compute_efficiency", "memory_efficiency", "attention_efficiency", "sustained"):
            _require_share(name, getattr(self, name))
        if self.product_memory_efficiency is not None:
            _require_share("product_memory_efficiency", self.product_memory_efficiency)
        for name in ("kernel_s", "launch_s", "attention_start_s", "attention_half_length"):
            require_amount(name, getattr(self, name))
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

    def product_shares(self, dtype: str) -> ProductShares:
        """How far products of this dtype stay below the peak."""
        return self.products.get(dtype) or ProductShares(efficiency=self.compute_efficiency)

    @property
    def product_bytes_per_s(self) -> float:
        """The bytes that a matrix product of a long job moves in a second."""
        share = self.product_memory_efficiency or self.memory_efficiency
        return self.memory_bandwidth_bytes_per_s * share * self.sustained

    @property
    def reached_bytes_per_s(self) -> float:
        """The bytes that an operation of a long job moves in a second."""
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency * self.sustained


def _shares(
    product_memory_efficiency: float,
    kernel_s: float,
    attention: tuple[float, float, float],
    **products: tuple[float, float, float],
) -> dict[str, Any]:
    """The numbers fitted to one type's kernels, by the names of a Datasheet's fields.

    Those of `attention` are its efficiency, `start_s` and `half_length`; those of products as ProductShares has them.
    """
    names = {"bf16": "bfloat16", "fp8": FLOAT8, "fp4": FLOAT4}
    efficiency, start_s, half_length = attention
    return {
        "product_memory_efficiency": product_memory_efficiency,
        "kernel_s": kernel_s,
        "attention_efficiency": efficiency,
        "attention_start_s": start_s,
        "attention_half_length": half_length,
        "sustained": 0.85,
        "products": {
            names[name]: ProductShares(efficiency=efficiency, start_depth=depth, tile_reads=reads)
            for name, (efficiency, depth, reads) in products.items()
        },
    }


KERNEL_SHARES = {
    "a100": _shares(0.66, 4e-06, (0.48, 2.5e-05, 500), bf16=(0.92, 128, 0.2)),
    "h100": _shares(0.78, 3e-06, (0.56, 1.7e-05, 1100), bf16=(0.82, 128, 0), fp8=(0.76, 256, 0)),
    "h200": _shares(0.78, 3e-06, (0.56, 1.8e-05, 1000), bf16=(0.84, 128, 0.05), fp8=(0.76, 256, 0)),
    "b200": _shares(
        0.64, 2.5e-06, (0.54, 2.1e-05, 1800), bf16=(0.72, 32, 0.05), fp8=(0.72, 192, 0.05), fp4=(0.52, 512, 0)
    ),
    "b300": _shares(
        0.64, 2e-06, (0.54, 2.1e-05, 1800), bf16=(0.76, 32, 0.05), fp8=(0.78, 128, 0.05), fp4=(0.48, 2048, 0.05)
    ),
    "gb200": _shares(
        0.66, 2.5e-06, (0.54, 2.1e-05, 1800), bf16=(0.7, 32, 0.05), fp8=(0.68, 256, 0.1), fp4=(0.5, 512, 0)
    ),
    "gb300": _shares(
        0.68, 2.5e-06, (0.54, 2.1e-05, 1800), bf16=(0.8, 48, 0.05), fp8=(0.78, 128, 0), fp4=(0.44, 1536, 0.75)
    ),
    "l40s": _shares(0.86, 1e-06, (0.48, 2.5e-05, 500), bf16=(0.6, 96, 0), fp8=(0.52, 64, 0)),
}
"""As `python -m benchmarks.kernels --fit` prints them. Attention was measured on A100, H100, H200 and B200: the other
Blackwells have a B200's, the L40S an A100's. What a long job sustains comes from measured iterations of A100s
(docs/benchmarks.md) and is taken for all.
"""

MEASURED = ("a100-40gb", "a100-80gb", "a800", "h100-sxm", "h800", "h200-sxm", "b200", "b300", "gb200", "gb300", "l40s")
"""The types with kernels of their own. An A800 and an H800 compute as an A100 and an H100."""

_V100 = {"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12}
_A100 = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12}
_H100 = {FLOAT8: 1978.9e12, "bfloat16": 989.4e12, "float16": 989.4e12, "float32": 67e12, "float64": 67e12}
_H100_PCIE = {FLOAT8: 1513e12, "bfloat16": 756e12, "float16": 756e12, "float32": 51e12, "float64": 51e12}
_H20 = {FLOAT8: 296e12, "bfloat16": 148e12, "float16": 148e12, "float32": 44e12}
_B200 = {FLOAT4: 9e15, FLOAT8: 4.5e15, "bfloat16": 2.25e15, "float16": 2.25e15, "float32": 75e12, "float64": 37e12}
_B300 = {FLOAT4: 13.5e15, FLOAT8: 4.5e15, "bfloat16": 2.25e15, "float16": 2.25e15, "float32": 75e12}
_GB200 = {FLOAT4: 10e15, FLOAT8: 5e15, "bfloat16": 2.5e15, "float16": 2.5e15, "float32": 80e12, "float64": 40e12}
_GB300 = {FLOAT4: 15e15, FLOAT8: 5e15, "bfloat16": 2.5e15, "float16": 2.5e15, "float32": 80e12}
_MI300X = {FLOAT8: 2614.9e12, "bfloat16": 1307.4e12, "float16": 1307.4e12, "float32": 163.4e12, "float64": 163.4e12}
_MI355X = {FLOAT4: 10.066e15, FLOAT8: 5.033e15, "bfloat16": 2.516e15, "float16": 2.516e15, "float32": 157.3e12}
_L40S = {FLOAT8: 733e12, "bfloat16": 362e12, "float16": 362e12, "float32": 91.6e12}
_L4 = {FLOAT8: 242.5e12, "bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12}
_T4 = {"float16": 65e12, "float32": 8.1e12}
_A10G = {"bfloat16": 70e12, "float16": 70e12, "float32": 31.5e12}
_RTX_3090 = {"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12}
_RTX_4090 = {"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12}


def _gpu(
    key: str, flops_per_s: Mapping[str, float], memory_bandwidth_bytes_per_s: float, multiprocessors: int, like: str
) -> Datasheet:
    """The type's datasheet with the shares that were measured on the type `like`."""
    known, shares = KNOWN_TYPES[key], KERNEL_SHARES[like]
    measured: dict[str, ProductShares] = shares["products"]
    units = {dtype: "bfloat16" if dtype == "float16" else dtype for dtype in flops_per_s}  # both types' are the same
    products = {dtype: measured[unit] for dtype, unit in units.items() if unit in measured}
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
        compute_efficiency=measured["bfloat16"].efficiency,
        measured=key in MEASURED,
        **(shares | {"products": products}),
    )


DATASHEETS: dict[str, Datasheet] = {
    "v100-16gb": _gpu("v100-16gb", _V100, 900e9, 80, "a100"),
    "v100-32gb": _gpu("v100-32gb", _V100, 900e9, 80, "a100"),
    "a100-40gb": _gpu("a100-40gb", _A100, 1555e9, 108, "a100"),
    "a100-80gb": _gpu("a100-80gb", _A100, 2039e9, 108, "a100"),
    "a800": _gpu("a800", _A100, 2039e9, 108, "a100"),
    "h100-sxm": _gpu("h100-sxm", _H100, 3350e9, 132, "h100"),
    "h100-pcie": _gpu("h100-pcie", _H100_PCIE, 2000e9, 114, "h100"),
    "h800": _gpu("h800", _H100, 3350e9, 132, "h100"),
    "h20": _gpu("h20", _H20, 4000e9, 78, "h100"),
    "h200-sxm": _gpu("h200-sxm", _H100, 4800e9, 132, "h200"),
    "b200": _gpu("b200", _B200, 8000e9, 148, "b200"),
    "b300": _gpu("b300", _B300, 8000e9, 148, "b300"),
    "gb200": _gpu("gb200", _GB200, 8000e9, 152, "gb200"),
    "gb300": _gpu("gb300", _GB300, 8000e9, 152, "gb300"),
    "mi300x": _gpu("mi300x", _MI300X, 5300e9, 304, "h100"),
    "mi325x": _gpu("mi325x", _MI300X, 6000e9, 304, "h100"),
    "mi355x": _gpu("mi355x", _MI355X, 8000e9, 256, "b200"),
    "l40s": _gpu("l40s", _L40S, 864e9, 142, "l40s"),
    "l4": _gpu("l4", _L4, 300e9, 58, "l40s"),
    "t4": _gpu("t4", _T4, 320e9, 40, "a100"),
    "a10g": _gpu("a10g", _A10G, 600e9, 80, "a100"),
    "rtx-3090": _gpu("rtx-3090", _RTX_3090, 936e9, 82, "a100"),
    "rtx-4090": _gpu("rtx-4090", _RTX_4090, 1008e9, 128, "l40s"),
}
"""Sources of the vendors' peaks:

    v100-*      NVIDIA V100 datasheet (2020): SXM2 125 Tflop/s in tensor cores, 15.7 in float32, HBM2 900 GB/s; it has
                no bfloat16.
    a100-*      NVIDIA A100 datasheet (2021): SXM 312 Tflop/s, float32 19.5 (outside TF32, as PyTorch computes unless
                set otherwise), 1,555 GB/s with 40 GB and 2,039 GB/s with 80 GB.
    h100-*      NVIDIA H100 datasheet (2023): SXM 989.4 Tflop/s, float32 67, HBM3 3.35 TB/s; PCIe 756 Tflop/s,
                float32 51, 2.0 TB/s.
    h200-sxm    NVIDIA H200 datasheet (2024): an H100 SXM with memory at 4.8 TB/s.
    h20         NVIDIA H20 (2024): 148 Tflop/s, 296 in 8 bits, float32 44, 4.0 TB/s.
    b200, b300  NVIDIA DGX B200 and DGX B300 datasheets (2025): 2,250 Tflop/s, 4,500 in 8 bits, 9,000 and 13,500 in 4;
                8 TB/s.
    gb200, gb300   NVIDIA GB200 and GB300 NVL72 datasheets (2025): 2,500 Tflop/s, 5,000 in 8 bits, 10,000 and 15,000 in
                4; 8 TB/s.
    mi300x, mi325x, mi355x   AMD Instinct data sheets (2023, 2024, 2025): 1,307 Tflop/s and 2,615 in 8 bits with 5.3 and
                6 TB/s; 2,516, 5,033 in 8 and 10,066 in 4 bits with 8 TB/s.
    l40s        NVIDIA L40S (2023): 362 Tflop/s, 733 in 8 bits, float32 91.6, 864 GB/s.
    l4, t4      NVIDIA L4 (2023) 121 Tflop/s, float32 30.3, 300 GB/s; T4 (2018) 65 Tflop/s in float16, float32 8.1,
                320 GB/s.
    a10g        NVIDIA A10G (2021) 70 Tflop/s, float32 31.5, 600 GB/s.
    rtx-3090    NVIDIA Ampere GA102 whitepaper (2020): 71 Tflop/s with float32 accumulation, float32 35.6, 936 GB/s.
    rtx-4090    NVIDIA Ada whitepaper (2022): 165.2 Tflop/s with float32 accumulation, float32 82.6, 1,008 GB/s.
"""


def find_datasheet(name_or_file: str) -> Datasheet:
    """The datasheet of this name or in this file. Raises InvalidInputError if there is none, or a field is wrong."""
    if name_or_file in DATASHEETS:
        return DATASHEETS[name_or_file]
    if not Path(name_or_file).is_file():
        near = ", ".join(name for name in sorted(DATASHEETS) if name.startswith(name_or_file.casefold() or " "))
        rule = f"must be a datasheet's file, or one of {', '.join(sorted(DATASHEETS))}"
        raise InvalidInputError("analytic", f"{rule} (near: {near})" if near else rule, name_or_file)
    from pipeplan.documents.files import read  # and pydantic, which datasheets known by name do without

    return read(Datasheet, Path(name_or_file))
