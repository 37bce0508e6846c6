"""Hosts: a device's share of its host in named servers (`documents.named_clusters` has the vendors' pages).

Memory is the server's by the same page, in equal parts for all devices. Its bandwidth is the peak of the processors'
channels (Intel's product specifications and AMD's datasheets), of two sockets. An update reaches less of it: Adam takes
0.22 s for 1 and 2.57 s for 10 billion parameters on a DGX-2 (Ren et al. 2021, table 4), 30 bytes each: 45 % of its
256 GB/s for the larger.

The link to the host is PCIe with 16 lanes, by the datasheets of `documents.devices`. Copies reach four fifths of its
peak, the rest being headers and acknowledgements: 12.8 GB/s of 16 on PCIe 3, 25.6 of 32 on PCIe 4. In servers with
NVLink two devices share a PCIe switch, and its one link to the processors (NVIDIA DGX-1 whitepaper, 2017; DGX A100 user
guide, 2020, system topology); of servers with H100s and later types this is an assumption. Two GB200s or GB300s share
the NVLink of one Grace processor, 450 GB/s in each direction (NVIDIA Grace Blackwell datasheet, 2024).
"""

from pipeplan.documents.cluster import Host
from pipeplan.documents.devices import GIB, KNOWN_TYPES

GB = 10**9

UPDATE_SHARE = 0.45
"""The share of the peak of the host's memory that an update reaches."""

COPY_SHARE = 0.8
"""The share of the peak of the link that copies reach."""

_LINK_BYTES_PER_S = {
    **dict.fromkeys(("v100", "t4"), 16e9),
    **dict.fromkeys(("a100", "a800", "a10g", "l4", "l40s"), 32e9),
    **dict.fromkeys(("h100", "h800", "h20", "h200", "b200", "mi300x", "mi325x", "mi355x"), 64e9),
    "b300": 128e9,
    **dict.fromkeys(("gb200", "gb300"), 450e9),
}
"""In one direction, by the first word of the type."""

_CHANNELS_BYTES_PER_S = {
    "Xeon E5 v4": 4 * 2400e6 * 8,
    "Xeon Skylake": 6 * 2666e6 * 8,
    "Xeon Cascade Lake": 6 * 2933e6 * 8,
    "Xeon Sapphire Rapids": 8 * 4800e6 * 8,
    "Xeon Emerald Rapids": 8 * 5600e6 * 8,
    "Xeon Granite Rapids": 8 * 6400e6 * 8,
    "EPYC Rome": 8 * 3200e6 * 8,
    "EPYC Milan": 8 * 3200e6 * 8,
    "EPYC Genoa": 12 * 4800e6 * 8,
    "EPYC Turin": 12 * 6000e6 * 8,
    "Grace": 512e9,
    "18 Grace": 18 * 512e9,
}
"""The memory channels of one socket together."""

_SERVERS: dict[str, tuple[int, str]] = {
    "dgx-v100": (512 * GB, "Xeon E5 v4"),
    "dgx-2": (1536 * GB, "Xeon Skylake"),
    "dgx-a100": (2000 * GB, "EPYC Rome"),
    "dgx-a100-40gb": (1000 * GB, "EPYC Rome"),
    "dgx-h100": (2000 * GB, "Xeon Sapphire Rapids"),
    "dgx-h200": (2000 * GB, "Xeon Sapphire Rapids"),
    "dgx-b200": (2000 * GB, "Xeon Emerald Rapids"),
    "dgx-b300": (2000 * GB, "Xeon Granite Rapids"),
    "dgx-a800": (2000 * GB, "EPYC Rome"),
    "dgx-h800": (2000 * GB, "Xeon Sapphire Rapids"),
    "hgx-h20": (2000 * GB, "Xeon Sapphire Rapids"),
    "gb200-nvl72": (36 * 480 * GB, "18 Grace"),
    "gb300-nvl72": (36 * 480 * GB, "18 Grace"),
    "p3.16xlarge": (488 * GIB, "Xeon E5 v4"),
    "p3dn.24xlarge": (768 * GIB, "Xeon Skylake"),
    "p4d.24xlarge": (1152 * GIB, "Xeon Cascade Lake"),
    "p4de.24xlarge": (1152 * GIB, "Xeon Cascade Lake"),
    "p5.48xlarge": (2048 * GIB, "EPYC Milan"),
    "p5e.48xlarge": (2048 * GIB, "EPYC Milan"),
    "p5en.48xlarge": (2048 * GIB, "Xeon Sapphire Rapids"),
    "p6-b200.48xlarge": (2048 * GIB, "Xeon Emerald Rapids"),
    "p6-b300.48xlarge": (4096 * GIB, "Xeon Granite Rapids"),
    "p6e-gb200.36xlarge": (960 * GIB, "Grace"),
    "g6e.48xlarge": (1536 * GIB, "EPYC Milan"),
    "g4dn.metal": (384 * GIB, "Xeon Cascade Lake"),
    "g5.48xlarge": (768 * GIB, "EPYC Rome"),
    "g6.48xlarge": (768 * GIB, "EPYC Milan"),
    "a2-highgpu-8g": (680 * GB, "Xeon Cascade Lake"),
    "a2-megagpu-16g": (1360 * GB, "Xeon Cascade Lake"),
    "a2-ultragpu-8g": (1360 * GB, "Xeon Cascade Lake"),
    "a3-highgpu-8g": (1872 * GB, "Xeon Sapphire Rapids"),
    "a3-megagpu-8g": (1872 * GB, "Xeon Sapphire Rapids"),
    "a3-ultragpu-8g": (2952 * GB, "Xeon Emerald Rapids"),
    "a4-highgpu-8g": (3968 * GB, "Xeon Emerald Rapids"),
    "a4x-highgpu-4g": (884 * GB, "Grace"),
    "a4x-maxgpu-4g-metal": (960 * GB, "Grace"),
    "g2-standard-96": (384 * GB, "Xeon Cascade Lake"),
    "l4": (384 * GB, "Xeon Cascade Lake"),
    "nd40rs-v2": (672 * GIB, "Xeon Skylake"),
    "nd-a100-v4": (900 * GIB, "EPYC Rome"),
    "ndm-a100-v4": (1900 * GIB, "EPYC Rome"),
    "nd-h100-v5": (1900 * GIB, "Xeon Sapphire Rapids"),
    "nd-h200-v5": (1850 * GIB, "Xeon Sapphire Rapids"),
    "nd-gb200-v6": (900 * GIB, "Grace"),
    "nd-mi300x-v5": (1850 * GIB, "Xeon Sapphire Rapids"),
    "bm.gpu4.8": (2048 * GB, "EPYC Rome"),
    "bm.gpu.a100-v2.8": (2048 * GB, "EPYC Milan"),
    "bm.gpu.h100.8": (2048 * GB, "Xeon Sapphire Rapids"),
    "bm.gpu.h200.8": (3072 * GB, "Xeon Sapphire Rapids"),
    "bm.gpu.b200.8": (4096 * GB, "Xeon Emerald Rapids"),
    "bm.gpu.gb200.4": (960 * GB, "Grace"),
    "bm.gpu.gb300.4": (960 * GB, "Grace"),
    "bm.gpu.mi300x.8": (2048 * GB, "Xeon Sapphire Rapids"),
    "bm.gpu.mi355x.8": (3072 * GB, "EPYC Turin"),
    "bm.gpu.l40s.4": (1024 * GB, "Xeon Sapphire Rapids"),
}
"""A server's memory, and the processors of both sockets."""


def host_of(server: str, device_type: str, devices: int) -> Host:
    """The share of one device of a named server."""
    memory_bytes, processor = _SERVERS[server]
    sharing = 2 if KNOWN_TYPES[device_type].peer_links else 1
    return Host(
        memory_bytes=memory_bytes // devices,
        bandwidth_bytes_per_s=COPY_SHARE * _LINK_BYTES_PER_S[device_type.partition("-")[0]] / sharing,
        update_bytes_per_s=UPDATE_SHARE * 2 * _CHANNELS_BYTES_PER_S[processor] / devices,
    )
