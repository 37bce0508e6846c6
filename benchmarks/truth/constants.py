"""Constants: the numbers fitted to the rows, at most six for a type of GPU and three for an engine, none by model."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.engines import EngineTimes
from pipeplan.documents.named_clusters import SERVERS
from pipeplan.errors import require
from worker_agent.profiler.datasheets import DATASHEETS, Datasheet

FILE = Path(__file__).parent.parent / "data" / "truth-constants.json"
"""The result of `--fit`, and for each model the constants fitted to the rows of all other models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConstants:
    """Of a type of GPU: a Datasheet's shares, and the shares of its link and of its network that exchanges reach."""

    compute_efficiency: float
    memory_efficiency: float
    attention_efficiency: float
    kernel_s: float
    link_efficiency: float
    network_efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConstants:
    """Of an engine.

    `host_s`, `gap_s` and `beside` are its EngineTimes. A compiler leaves the share `compiled` of what operations
    without products take; the allocator holds the share `reserve` on top of what is in use where memory is fullest. In
    a trace, devices that share an operation do not divide `unshared_s` of it.
    """

    host_s: float | None = None
    gap_s: float | None = None
    beside: float | None = None
    compiled: float | None = None
    reserve: float | None = None
    unshared_s: float | None = None

    @property
    def times(self) -> EngineTimes:
        """Those that plans have."""
        host_s, gap_s, beside = (value or 0.0 for value in (self.host_s, self.gap_s, self.beside))
        return EngineTimes(host_s=host_s, gap_s=gap_s, beside=beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """All of them, by the names of GPU types and engines."""

    gpus: Mapping[str, GpuConstants]
    engines: Mapping[str, EngineConstants]

    def document(self) -> dict[str, dict[str, dict[str, float]]]:
        """As JSON has it: those of an engine that it has no use for are left out."""
        gpus = {name: asdict(each) for name, each in self.gpus.items()}
        engines = {
            name: {key: value for key, value in asdict(each).items() if value is not None}
            for name, each in self.engines.items()
        }
        return {"gpus": gpus, "engines": engines}

    @classmethod
    def read(cls, document: Mapping[str, Mapping[str, Mapping[str, float]]]) -> "Constants":
        """From such a document."""
        return cls(
            gpus={name: GpuConstants(**each) for name, each in document["gpus"].items()},
            engines={name: EngineConstants(**each) for name, each in document["engines"].items()},
        )


def stored() -> tuple[Constants, dict[str, Constants]]:
    """Those fitted to all rows, and for each model those fitted without it."""
    document = json.loads(FILE.read_text())
    without = {model: Constants.read(each) for model, each in document["without"].items()}
    return Constants.read(document["all"]), without


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of the data: which constants are its, its datasheet without them, and the servers that it stands in."""

    constants: str
    sheet: Datasheet
    server: str


GPUS = {
    "a100-40gb": Gpu(constants="a100", sheet=DATASHEETS["a100-40gb"], server="dgx-a100-40gb"),
    "a100-80gb": Gpu(constants="a100", sheet=DATASHEETS["a100-80gb"], server="dgx-a100"),
    "h100-80gb": Gpu(constants="h100", sheet=DATASHEETS["h100-sxm"], server="dgx-h100"),
    "h100-96gb-hbm2e-500w": Gpu(
        constants="h100-500w",
        sheet=replace(
            DATASHEETS["h100-sxm"],
            name="H100-96GB-500W",
            memory_bytes=95 * 2**30,
            memory_bandwidth_bytes_per_s=2.4e12,
        ),
        server="dgx-h100",
    ),
}


def require_known(gpu: str, place: str) -> None:
    """Raises InvalidInputError for a GPU that no constants were fitted for."""
    require(gpu in GPUS, f"{place} gpu", f"must be one of {', '.join(GPUS)}, which constants are fitted for", gpu)


@lru_cache(maxsize=256)
def sheet_of(gpu: str, constants: GpuConstants) -> Datasheet:
    """The datasheet with the constants in it."""
    return replace(
        GPUS[gpu].sheet,
        compute_efficiency=constants.compute_efficiency,
        memory_efficiency=constants.memory_efficiency,
        attention_efficiency=constants.attention_efficiency,
        kernel_s=constants.kernel_s,
    )


@lru_cache(maxsize=4096)
def cluster_of(
    gpu: str, constants: GpuConstants, network_bytes_per_s: float | None, devices: int, nodes_of: int
) -> Cluster:
    """Servers of so many devices, with what exchanges reach of their links; None: the network is the server's."""
    server = SERVERS[GPUS[gpu].server]
    found = server.cluster(max(2, -(-devices // nodes_of)))
    inside, between = found.levels
    whole = network_bytes_per_s or between.bandwidth_bytes_per_s
    inside = replace(
        inside, size=nodes_of, bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s * constants.link_efficiency
    )
    between = Level(
        size=between.size,
        bandwidth_bytes_per_s=whole * constants.network_efficiency,
        device_bandwidth_bytes_per_s=whole / server.devices * constants.network_efficiency,
        latency_s=between.latency_s,
    )
    return Cluster(device=GPUS[gpu].sheet.device(), levels=(inside, between))
