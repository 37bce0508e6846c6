"""Named clusters: servers that can be bought or rented, and clusters of them.

`dgx-h100` is one server, `dgx-h100:32` are 32 of them. Inside a server its devices are joined by their own links.
Servers of GB200s and GB300s have 4 devices, and up to 18 servers of a rack are joined by the same links as their
devices: 16 of them are one level of 64 devices, 32 of them two such racks. The network between servers has no
bottlenecks of its own: a server has the bandwidth of all its network cards together; a
device has that of its own cards, or of the one card that it shares with others.

Vendors state bandwidths; latencies are taken from elsewhere. A message over RDMA takes the 14 us that NCCL's own tuning
table has for its simple protocol on a network (NCCL 2.19, src/graph/tuning.cc). Over TCP it takes 30 us, the middle of
the 10 to 50 us that Oracle measured ("Zettascale OSU NCCL benchmark", 2025).

Not said here: in servers of V100 without a switch (DGX-1, p3, ND40rs) two devices share one or two of the six NVLinks,
which only collectives use all at once. In servers of L4, T4 and A10G traffic between sockets is slower than PCIe.

What a device has of its host is in `documents.hosts`.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from pipeplan.documents.cluster import MAX_DEVICES, Cluster, Level, known_types
from pipeplan.documents.devices import KNOWN_TYPES
from pipeplan.documents.hosts import host_of
from pipeplan.errors import InvalidInputError, require

RDMA_LATENCY_S = 14e-6
TCP_LATENCY_S = 30e-6

USUAL_DEVICES = 8
"""The number of devices of a server if no named server has the type."""

_SEPARATORS = re.compile(r"[\s_]+")
_NODES = re.compile(r"[0-9]{1,9}")
_COUNTED = re.compile(r"(?P<before>\d+)-?[x*]-?(?P<last>.*?)|(?P<first>.*?)-?[x*]-?(?P<after>\d+)")
"""`8xh100` and `dgx-h100 x 4`, when plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server: a number of devices of a known type, its network cards, and the vendor's page.

    `card_bytes_per_s` is the speed of one card in each direction. At most `rack` servers are joined by their devices'
    links.
    """

    name: str
    type: str
    devices: int
    cards: int
    card_bytes_per_s: float
    latency_s: float
    source: str
    rack: int = 1

    @property
    def network_bytes_per_s(self) -> float:
        """The bandwidth of the whole server."""
        return self.cards * self.card_bytes_per_s

    @property
    def device_network_bytes_per_s(self) -> float:
        """The bandwidth of one device: that of its own cards, or of the card that it shares."""
        return self.card_bytes_per_s * max(1, self.cards // self.devices)

    def cluster(self, nodes: int) -> Cluster:
        """A cluster of these servers: in as few racks as hold equal numbers of them.

        Raises InvalidInputError for no servers, or for more devices than a cluster may have.
        """
        known = KNOWN_TYPES[self.type]
        together = max(n for n in range(1, self.rack + 1) if nodes % n == 0)
        inside = Level(
            size=together * self.devices,
            bandwidth_bytes_per_s=known.link_bandwidth_bytes_per_s,
            latency_s=known.link_latency_s,
            collectives=known.collectives,
        )
        own, whole = self.device_network_bytes_per_s, together * self.network_bytes_per_s
        between = Level(
            size=nodes // together,
            bandwidth_bytes_per_s=whole,
            latency_s=self.latency_s,
            device_bandwidth_bytes_per_s=own if own < whole else None,
        )
        levels = (inside,) if nodes == together else (inside, between)
        return Cluster(device=known.device, levels=levels, host=host_of(self.name, self.type, self.devices))


def _server(
    name: str, type_: str, devices: int, cards: int, gbit_per_s: float, network: str, source: str, rack: int = 1
) -> Server:
    latency_s = TCP_LATENCY_S if network == "TCP" else RDMA_LATENCY_S
    return Server(
        name=name,
        type=type_,
        devices=devices,
        cards=cards,
        card_bytes_per_s=gbit_per_s * 1e9 / 8,
        latency_s=latency_s,
        source=f"{source}: {cards} x {gbit_per_s:g} Gb/s {network}",
        rack=rack,
    )


_AWS = "AWS, EC2 accelerated computing instances"
_GOOGLE = "Google Cloud, Networking and GPU machines (2025)"
_AZURE = "Microsoft Learn, Azure virtual machine sizes"
_ORACLE = "Oracle Cloud, Compute shapes (2025)"

_ALL = (
    _server("dgx-v100", "v100-32gb", 8, 4, 100, "InfiniBand", "NVIDIA DGX-1 with V100 datasheet (2018)"),
    _server("dgx-2", "v100-32gb", 16, 8, 100, "InfiniBand", "NVIDIA DGX-2 datasheet (2018)"),
    _server("dgx-a100", "a100-80gb", 8, 8, 200, "InfiniBand", "NVIDIA DGX A100 640GB datasheet (2021)"),
    _server("dgx-a100-40gb", "a100-40gb", 8, 8, 200, "InfiniBand", "NVIDIA DGX A100 320GB datasheet (2020)"),
    _server("dgx-h100", "h100-sxm", 8, 8, 400, "InfiniBand", "NVIDIA DGX H100 datasheet (2023)"),
    _server("dgx-h200", "h200-sxm", 8, 8, 400, "InfiniBand", "NVIDIA DGX H200 datasheet (2024)"),
    _server("dgx-b200", "b200", 8, 8, 400, "InfiniBand", "NVIDIA DGX B200 datasheet (2025)"),
    _server("dgx-b300", "b300", 8, 8, 800, "InfiniBand", "NVIDIA DGX B300 datasheet (2025)"),
    _server("gb200-nvl72", "gb200", 72, 72, 400, "InfiniBand", "NVIDIA DGX GB200 datasheet (2025)"),
    _server("gb300-nvl72", "gb300", 72, 72, 800, "InfiniBand", "NVIDIA DGX GB300 datasheet (2025)"),
    _server("dgx-a800", "a800", 8, 8, 200, "InfiniBand", "NVIDIA DGX A800 640GB datasheet (2022)"),
    _server("dgx-h800", "h800", 8, 8, 400, "InfiniBand", "NVIDIA DGX H800 datasheet (2023)"),
    _server("hgx-h20", "h20", 8, 8, 400, "InfiniBand", "NVIDIA HGX reference design with H20 (2024)"),
    _server("p3.16xlarge", "v100-16gb", 8, 1, 25, "TCP", f"{_AWS}, P3 (2017)"),
    _server("p3dn.24xlarge", "v100-32gb", 8, 1, 100, "EFA", f"{_AWS}, P3 (2018)"),
    _server("p4d.24xlarge", "a100-40gb", 8, 4, 100, "EFA", f"{_AWS}, P4 (2020)"),
    _server("p4de.24xlarge", "a100-80gb", 8, 4, 100, "EFA", f"{_AWS}, P4 (2022)"),
    _server("p5.48xlarge", "h100-sxm", 8, 32, 100, "EFA", f"{_AWS}, P5 (2023)"),
    _server("p5e.48xlarge", "h200-sxm", 8, 32, 100, "EFA", f"{_AWS}, P5 (2024)"),
    _server("p5en.48xlarge", "h200-sxm", 8, 16, 200, "EFA", f"{_AWS}, P5 (2024)"),
    _server("p6-b200.48xlarge", "b200", 8, 8, 400, "EFA", f"{_AWS}, P6 (2025)"),
    _server("p6-b300.48xlarge", "b300", 8, 8, 800, "EFA", f"{_AWS}, P6 (2025)"),
    _server("p6e-gb200.36xlarge", "gb200", 4, 4, 400, "EFA", f"{_AWS}, P6e UltraServers (2025)", 18),
    _server("g6e.48xlarge", "l40s", 8, 4, 100, "EFA", f"{_AWS}, G6e (2024)"),
    _server("g4dn.metal", "t4", 8, 1, 100, "EFA", f"{_AWS}, G4 (2020)"),
    _server("g5.48xlarge", "a10g", 8, 1, 100, "EFA", f"{_AWS}, G5 (2021)"),
    _server("g6.48xlarge", "l4", 8, 1, 100, "EFA", f"{_AWS}, G6 (2024)"),
    _server("a2-highgpu-8g", "a100-40gb", 8, 1, 100, "TCP", f"{_GOOGLE}, A2"),
    _server("a2-megagpu-16g", "a100-40gb", 16, 1, 100, "TCP", f"{_GOOGLE}, A2"),
    _server("a2-ultragpu-8g", "a100-80gb", 8, 1, 100, "TCP", f"{_GOOGLE}, A2 Ultra"),
    _server("a3-highgpu-8g", "h100-sxm", 8, 4, 200, "TCP", f"{_GOOGLE}, A3 High, GPUDirect-TCPX"),
    _server("a3-megagpu-8g", "h100-sxm", 8, 8, 200, "TCP", f"{_GOOGLE}, A3 Mega, GPUDirect-TCPXO"),
    _server("a3-ultragpu-8g", "h200-sxm", 8, 8, 400, "RoCE", f"{_GOOGLE}, A3 Ultra"),
    _server("a4-highgpu-8g", "b200", 8, 8, 400, "RoCE", f"{_GOOGLE}, A4"),
    _server("a4x-highgpu-4g", "gb200", 4, 4, 400, "RoCE", f"{_GOOGLE}, A4X", 18),
    _server("a4x-maxgpu-4g-metal", "gb300", 4, 4, 800, "RoCE", f"{_GOOGLE}, A4X Max", 18),
    _server("g2-standard-96", "l4", 8, 1, 100, "TCP", f"{_GOOGLE}, G2"),
    _server("l4", "l4", 8, 1, 100, "TCP", f"{_GOOGLE}, G2, as g2-standard-96"),
    _server("nd40rs-v2", "v100-32gb", 8, 1, 100, "InfiniBand", f"{_AZURE}, NDv2 series (2020)"),
    _server("nd-a100-v4", "a100-40gb", 8, 8, 200, "InfiniBand", f"{_AZURE}, ND A100 v4 series (2021)"),
    _server("ndm-a100-v4", "a100-80gb", 8, 8, 200, "InfiniBand", f"{_AZURE}, NDm A100 v4 series (2021)"),
    _server("nd-h100-v5", "h100-sxm", 8, 8, 400, "InfiniBand", f"{_AZURE}, ND H100 v5 series (2023)"),
    _server("nd-h200-v5", "h200-sxm", 8, 8, 400, "InfiniBand", f"{_AZURE}, ND H200 v5 series (2024)"),
    _server("nd-gb200-v6", "gb200", 4, 4, 400, "InfiniBand", f"{_AZURE}, ND GB200 v6 series (2025)", 18),
    _server("nd-mi300x-v5", "mi300x", 8, 8, 400, "InfiniBand", f"{_AZURE}, ND MI300X v5 series (2024)"),
    _server("bm.gpu4.8", "a100-40gb", 8, 16, 100, "RoCE", f"{_ORACLE}, BM.GPU4.8"),
    _server("bm.gpu.a100-v2.8", "a100-80gb", 8, 16, 100, "RoCE", f"{_ORACLE}, BM.GPU.A100-v2.8"),
    _server("bm.gpu.h100.8", "h100-sxm", 8, 16, 200, "RoCE", f"{_ORACLE}, BM.GPU.H100.8"),
    _server("bm.gpu.h200.8", "h200-sxm", 8, 8, 400, "RoCE", f"{_ORACLE}, BM.GPU.H200.8"),
    _server("bm.gpu.b200.8", "b200", 8, 8, 400, "RoCE", f"{_ORACLE}, BM.GPU.B200.8"),
    _server("bm.gpu.gb200.4", "gb200", 4, 4, 400, "RoCE", f"{_ORACLE}, BM.GPU.GB200.4", 18),
    _server("bm.gpu.gb300.4", "gb300", 4, 4, 800, "RoCE", f"{_ORACLE}, BM.GPU.GB300.4", 18),
    _server("bm.gpu.mi300x.8", "mi300x", 8, 8, 400, "RoCE", f"{_ORACLE}, BM.GPU.MI300X.8"),
    _server("bm.gpu.mi355x.8", "mi355x", 8, 8, 400, "RoCE", f"{_ORACLE}, BM.GPU.MI355X.8"),
    _server("bm.gpu.l40s.4", "l40s", 4, 4, 200, "RoCE", f"{_ORACLE}, BM.GPU.L40S.4"),
)

SERVERS: dict[str, Server] = {server.name: server for server in _ALL}
"""Network cards are those over which devices exchange; cards for storage and management do not count."""


def named_cluster(text: str, *, field: str = "cluster", or_else: str = "a file") -> Cluster:
    """The cluster that `NAME` or `NAME:NODES` stands for; case does not matter, nor whether - or _ separates.

    Raises InvalidInputError for a name that is not known, with those that are near, and for a wrong number of nodes.
    The error says that the field may hold something else as well.
    """
    name, colon, nodes = text.partition(":")
    server = SERVERS.get(_plain(name))
    if server is None:
        rule = f"must be {or_else}, or NAME or NAME:NODES of a known cluster ({_near(name)})"
        raise InvalidInputError(field, rule, text)
    if not colon:
        return server.cluster(1)
    rule = f"must have a whole number of nodes after the colon, as {server.name}:4"
    require(_NODES.fullmatch(nodes) is not None, field, rule, text)
    rule = f"must have from 1 to {MAX_DEVICES // server.devices} nodes"
    require(0 < int(nodes) * server.devices <= MAX_DEVICES, field, rule, text)
    return server.cluster(int(nodes))


def _near(name: str) -> str:
    """What a name that is not known most likely means."""
    plain = _plain(name)
    counted = _COUNTED.fullmatch(plain)
    alone = plain if counted is None else counted["first"] or counted["last"] or ""
    if counted is not None and alone in SERVERS:
        return f"{alone}:{counted['before'] or counted['after']} is meant: that many servers"
    for device in (plain.removeprefix("nvidia-"), alone.removeprefix("nvidia-")):
        types = [each for each in KNOWN_TYPES if each == device or each.startswith(f"{device}-")]
        servers = ", ".join(f"{server.name} ({server.devices})" for server in _ALL if server.type in types)
        if types:
            return f"{device} is a device; servers with it, and how many: {servers or 'none that is known'}"
    near = get_close_matches(alone, SERVERS, n=4, cutoff=0.6)
    near += [known for known in SERVERS if alone and known.startswith(alone) and known not in near]
    return f"near: {', '.join(near)}" if near else "`pipeplan clusters` lists them"


def is_named(text: str) -> bool:
    """Whether a text begins with the name of a known cluster."""
    return _plain(text.partition(":")[0]) in SERVERS


def most_devices(name: str) -> int:
    """The maximum number of devices of this name in a server."""
    types = known_types(name)
    return max((server.devices for server in _ALL if server.type in types), default=USUAL_DEVICES)


def _plain(name: str) -> str:
    return _SEPARATORS.sub("-", name.strip()).casefold()
