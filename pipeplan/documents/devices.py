"""Devices: the types of accelerators that are known by name, and their properties except speed.

Memory is what a driver leaves of the vendor's figure, as PyTorch reports it. The context's bytes and the allocator's
reserve are what PyTorch takes in most programs. The link is the one between neighbouring devices of a server, in one
direction: half of what vendors state for both directions together.

    v100-*      NVIDIA V100 datasheet (2020): 16 and 32 GB, NVLink 300 GB/s in both directions.
    a100-*      NVIDIA A100 datasheet (2021): 40 and 80 GB, NVLink 600 GB/s.
    h100-*      NVIDIA H100 datasheet (2023): 80 GB; SXM has NVLink 900 GB/s, PCIe is PCIe 5 of 128 GB/s.
    h200-sxm    NVIDIA H200 datasheet (2024): 141 GB, NVLink 900 GB/s.
    h800, a800  NVIDIA HGX H800 and A800 (2023): an H100 SXM and an A100 80 GB with NVLink 400 GB/s.
    h20         NVIDIA H20 (2024): 96 GB, NVLink 900 GB/s.
    b200, b300  NVIDIA DGX B200 and DGX B300 datasheets (2025): 180 and 288 GB, NVLink 1,800 GB/s.
    gb200, gb300   NVIDIA GB200 and GB300 NVL72 datasheets (2025): 186 and 279 GB, NVLink 1,800 GB/s.
    mi300x, mi325x, mi355x   AMD Instinct data sheets (2023, 2024, 2025): 192, 256, 288 GB; seven Infinity Fabric links
                of 128 GB/s, of the MI355X 153.6 GB/s.
    l4, t4      NVIDIA L4 (2023), 24 GB on PCIe 4 of 64 GB/s; T4 (2018), 16 GB on PCIe 3 of 32 GB/s.
    l40s        NVIDIA L40S (2023): 48 GB, PCIe 4.
    a10g        NVIDIA A10G (2021): 24 GB, PCIe 4.
    rtx-3090    NVIDIA Ampere GA102 whitepaper (2020): 24 GB, PCIe 4.
    rtx-4090    NVIDIA Ada whitepaper (2022): 24 GB, PCIe 4.

How fast they compute is in the worker's datasheets (`worker_agent.profiler.datasheets`), under the same keys.
"""

from dataclasses import dataclass

from pipeplan.documents.collectives import MEASURED_COLLECTIVES, Collectives
from pipeplan.documents.profile import Device

GIB = 2**30
CONTEXT_BYTES = 600 * 2**20
ALLOCATOR_RESERVE = 0.05
PEER_LINK_LATENCY_S = 5e-6
PCIE_LATENCY_S = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownType:
    """A type of device, and its link to the others of a server.

    `peer_links`: devices are joined by links of their own (NVLink, Infinity Fabric), else by PCIe. `collectives`: what
    was measured over these links; None: nothing.
    """

    device: Device
    link_bandwidth_bytes_per_s: float
    peer_links: bool
    collectives: Collectives | None = None

    @property
    def link_latency_s(self) -> float:
        """Of one message to a neighbour."""
        return PEER_LINK_LATENCY_S if self.peer_links else PCIE_LATENCY_S


def _gpu(
    name: str, memory_gib: float, link_bandwidth_bytes_per_s: float, *, peer_links: bool, measured: str | None = None
) -> KnownType:
    device = Device(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        context_bytes=CONTEXT_BYTES,
        allocator_reserve=ALLOCATOR_RESERVE,
    )
    collectives = MEASURED_COLLECTIVES[measured] if measured else None
    return KnownType(
        device=device,
        link_bandwidth_bytes_per_s=link_bandwidth_bytes_per_s,
        peer_links=peer_links,
        collectives=collectives,
    )


KNOWN_TYPES: dict[str, KnownType] = {
    "v100-16gb": _gpu("V100-SXM2-16GB", 15.7, 150e9, peer_links=True),
    "v100-32gb": _gpu("V100-SXM2-32GB", 31.7, 150e9, peer_links=True),
    "a100-40gb": _gpu("A100-SXM4-40GB", 39.3, 300e9, peer_links=True, measured="a100"),
    "a100-80gb": _gpu("A100-SXM4-80GB", 79.1, 300e9, peer_links=True, measured="a100"),
    "h100-sxm": _gpu("H100-SXM5-80GB", 79.1, 450e9, peer_links=True, measured="h100"),
    "h100-pcie": _gpu("H100-PCIe-80GB", 79.1, 64e9, peer_links=False),
    "h200-sxm": _gpu("H200-SXM-141GB", 139.7, 450e9, peer_links=True, measured="h200"),
    "a800": _gpu("A800-SXM4-80GB", 79.1, 200e9, peer_links=True, measured="a100"),
    "h800": _gpu("H800-SXM5-80GB", 79.1, 200e9, peer_links=True, measured="h100"),
    "h20": _gpu("H20-96GB", 95.1, 450e9, peer_links=True, measured="h200"),
    "b200": _gpu("B200-SXM6-180GB", 178.4, 900e9, peer_links=True, measured="b200"),
    "b300": _gpu("B300-SXM6-288GB", 267.7, 900e9, peer_links=True, measured="b300"),
    "gb200": _gpu("GB200-186GB", 184.0, 900e9, peer_links=True, measured="gb200"),
    "gb300": _gpu("GB300-279GB", 276.6, 900e9, peer_links=True, measured="gb300"),
    "mi300x": _gpu("MI300X-192GB", 191.5, 448e9, peer_links=True),
    "mi325x": _gpu("MI325X-256GB", 255.5, 448e9, peer_links=True),
    "mi355x": _gpu("MI355X-288GB", 287.5, 537.6e9, peer_links=True),
    "l40s": _gpu("L40S", 44.4, 32e9, peer_links=False),
    "l4": _gpu("L4", 22.0, 32e9, peer_links=False),
    "t4": _gpu("T4", 14.5, 16e9, peer_links=False),
    "a10g": _gpu("A10G", 21.9, 32e9, peer_links=False),
    "rtx-3090": _gpu("RTX 3090", 23.6, 32e9, peer_links=False),
    "rtx-4090": _gpu("RTX 4090", 23.6, 32e9, peer_links=False),
}
"""By the keys of the datasheets."""
