"""Rows: measured iterations, whatever the form of the file that has them.

A row says what ran: a model's SPEC, a named cluster, and the options that `pipeplan solve` has for it. What it leaves
open, the planner chooses.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.named_clusters import SERVERS
from pipeplan.errors import require
from pipeplan.planners.problem import Options
from pipeplan.protocol.estimates import Dtype
from pipeplan.questions.smallest import sub_cluster

GIB = 2**30

GPUS = {
    "a100-40gb": "dgx-a100-40gb",
    "a100-80gb": "dgx-a100",
    "h100": "dgx-h100",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
    "b300": "dgx-b300",
    "gb200": "nd-gb200-v6",
    "gb300": "bm.gpu.gb300.4",
}
"""The named servers of the data's GPUs, by the beginning of a GPU's name; the longest that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What ran a source's rows: an engine, the attention and the kernels that it had.

    `network_gbit_per_s` is a node's where it is not the named server's; `memory_gib` a device's where it is not the
    datasheet's.
    """

    engine: str
    attention: Literal["flash", "unfused"] = "flash"
    fusion: Literal["all", "loss", "none"] = "all"
    network_gbit_per_s: float | None = None
    memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured configuration. `seconds` are an iteration's, None for one that ran out of memory.

    `clean`: whether its seconds are good to compare with; `memory_gib` is the peak of the fullest device, where it was
    published.
    """

    source: str
    model: str
    spec: str
    gpu: str
    gpus: int
    nodes_of: int
    sequence_length: int
    batch: int
    dtype: Dtype
    precision: str | None
    program: Program
    options: Options
    seconds: float | None
    memory_gib: float | None = None
    clean: bool = True

    @property
    def group(self) -> tuple[object, ...]:
        """What rows have in common among which one chooses."""
        return self.source, self.model, self.gpu, self.gpus, self.batch, self.sequence_length, self.precision

    @property
    def cluster(self) -> Cluster:
        """The devices: as many of the named server's as the row has, in nodes of its size."""
        server = SERVERS[server_of(self.gpu)]
        if server.rack == 1 and self.nodes_of < server.devices:
            cards = max(1, server.cards * self.nodes_of // server.devices)
            server = replace(server, devices=self.nodes_of, cards=cards)
        if self.program.network_gbit_per_s is not None:
            card = self.program.network_gbit_per_s * 1e9 / 8 / server.cards
            server = replace(server, card_bytes_per_s=card)
        whole = server.cluster(max(1, -(-self.gpus // server.devices)))
        found = sub_cluster(whole, self.gpus) if self.gpus < whole.devices else whole
        if self.program.memory_gib is None:
            return found
        return replace(found, device=replace(found.device, memory_bytes=int(self.program.memory_gib * GIB)))


def server_of(gpu: str, place: str = "gpu") -> str:
    """The named server with such GPUs. Raises InvalidInputError for a GPU that is in none."""
    found = max((name for name in GPUS if gpu.startswith(name)), key=len, default=None)
    require(found is not None, place, f"must begin with one of {', '.join(GPUS)}", gpu)
    return GPUS[found or ""]


def by_source(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each source, in the order in which they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.source, []).append(row)
    return found
