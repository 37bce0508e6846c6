"""Machines: the GPUs of the data, and the servers that they stand in."""

from dataclasses import dataclass, replace
from functools import lru_cache

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.named_clusters import SERVERS
from pipeplan.errors import require
from worker_agent.profiler.datasheets import DATASHEETS, Datasheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of the data: its datasheet, and a named server that holds it."""

    sheet: Datasheet
    server: str


_H100_500W = replace(
    DATASHEETS["h100-sxm"],
    name="H100-96GB-500W",
    memory_bytes=95 * 2**30,
    memory_bandwidth_bytes_per_s=2.4e12,
    sustained=0.65,
    measured=False,
)
"""torchtitan's card: at most 500 W, and so the share of an H100's speed that its two 16-bit rows show."""

GPUS = {
    "a100-40gb": Gpu(sheet=DATASHEETS["a100-40gb"], server="dgx-a100-40gb"),
    "a100-80gb": Gpu(sheet=DATASHEETS["a100-80gb"], server="dgx-a100"),
    "h100-80gb": Gpu(sheet=DATASHEETS["h100-sxm"], server="dgx-h100"),
    "h100-96gb-hbm2e-500w": Gpu(sheet=_H100_500W, server="dgx-h100"),
    "h200": Gpu(sheet=DATASHEETS["h200-sxm"], server="dgx-h200"),
    "b200": Gpu(sheet=DATASHEETS["b200"], server="dgx-b200"),
    "b300": Gpu(sheet=DATASHEETS["b300"], server="dgx-b300"),
    "gb200": Gpu(sheet=DATASHEETS["gb200"], server="gb200-nvl72"),
    "gb300": Gpu(sheet=DATASHEETS["gb300"], server="gb300-nvl72"),
}


def require_known(gpu: str, place: str) -> None:
    """Raises InvalidInputError for a GPU without a machine here."""
    require(gpu in GPUS, f"{place} gpu", f"must be one of {', '.join(GPUS)}", gpu)


@lru_cache(maxsize=4096)
def cluster_of(gpu: str, network_bytes_per_s: float | None, devices: int, nodes_of: int) -> Cluster:
    """Servers of so many devices; None: the network is the named server's."""
    server = SERVERS[GPUS[gpu].server]
    found = server.cluster(max(2, -(-devices // nodes_of)))
    inside, between = found.levels
    whole = network_bytes_per_s or between.bandwidth_bytes_per_s
    between = Level(
        size=between.size,
        bandwidth_bytes_per_s=whole,
        device_bandwidth_bytes_per_s=whole / server.devices,
        latency_s=between.latency_s,
    )
    return Cluster(device=GPUS[gpu].sheet.device(), levels=(replace(inside, size=nodes_of), between))
