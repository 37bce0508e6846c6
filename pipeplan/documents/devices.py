"""Devices: the types of accelerators that are known by name, and their properties except speed.

Memory is what a driver leaves of the vendor's figure, as PyTorch reports it. The context's bytes and the allocator's
reserve are what PyTorch takes in most programs. The link is the one between neighbouring devices of a server, in one
direction: half of what vendors state for both directions together.

    v100-*      NVIDIA V100 datasheet (2020): 16 and 32 GB, NVLink 300 GB/s in both directions.
    a100-*      NVIDIA A100 datasheet (2021): 40 and 80 GB, NVLink 600 GB/s.
    h100-*      NVIDIA H100 datasheet (2023): 80 GB; SXM has NVLink 900 GB/s, PCIe is PCIe 5 of 128 GB/s.
    h200-sxm    NVIDIA H200 datasheet (2024): 141 GB, NVLink 900 GB/s.
    l4, t4      NVIDIA L4 (2023), 24 GB on PCIe 4 of 64 GB/s; T4 (2018), 16 GB on PCIe 3 of 32 GB/s.
    a10g        NVIDIA A10G (2021): 24 GB, PCIe 4.
    rtx-3090    NVIDIA Ampere GA102 whitepaper (2020): 24 GB, PCIe 4.
    rtx-4090    NVIDIA Ada whitepaper (2022): 24 GB, PCIe 4.

How fast they compute is in the worker's datasheets (`worker_agent.profiler.datasheets`), under the same keys.
"""

from dataclasses import dataclass

from pipeplan.documents.profile import Device

GIB = 2**30
CONTEXT_BYTES = 600 * 2**20
ALLOCATOR_RESERVE = 0.05
NVLINK_LATENCY_S = 5e-6
PCIE_LATENCY_S = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownType:
    """A type of device, and its link to the others of a server. `nvlink`: the link is NVLink, else PCIe."""

    device: Device
    link_bandwidth_bytes_per_s: float
    nvlink: bool

    @property
    def link_latency_s(self) -> float:
        """Of one message to a neighbour."""
        return NVLINK_LATENCY_S if self.nvlink else PCIE_LATENCY_S


def _gpu(name: str, memory_gib: float, link_bandwidth_bytes_per_s: float, *, nvlink: bool) -> KnownType:
    device = Device(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        context_bytes=CONTEXT_BYTES,
        allocator_reserve=ALLOCATOR_RESERVE,
    )
    return KnownType(device=device, link_bandwidth_bytes_per_s=link_bandwidth_bytes_per_s, nvlink=nvlink)


KNOWN_TYPES: dict[str, KnownType] = {
    "v100-16gb": _gpu("V100-SXM2-16GB", 15.7, 150e9, nvlink=True),
    "v100-32gb": _gpu("V100-SXM2-32GB", 31.7, 150e9, nvlink=True),
    "a100-40gb": _gpu("A100-SXM4-40GB", 39.3, 300e9, nvlink=True),
    "a100-80gb": _gpu("A100-SXM4-80GB", 79.1, 300e9, nvlink=True),
    "h100-sxm": _gpu("H100-SXM5-80GB", 79.1, 450e9, nvlink=True),
    "h100-pcie": _gpu("H100-PCIe-80GB", 79.1, 64e9, nvlink=False),
    "h200-sxm": _gpu("H200-SXM-141GB", 139.7, 450e9, nvlink=True),
    "l4": _gpu("L4", 22.0, 32e9, nvlink=False),
    "t4": _gpu("T4", 14.5, 16e9, nvlink=False),
    "a10g": _gpu("A10G", 21.9, 32e9, nvlink=False),
    "rtx-3090": _gpu("RTX 3090", 23.6, 32e9, nvlink=False),
    "rtx-4090": _gpu("RTX 4090", 23.6, 32e9, nvlink=False),
}
"""By the keys of the datasheets."""
