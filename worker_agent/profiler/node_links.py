"""Node links: bandwidth and latency between the devices of this node, and between it and other nodes, as a cluster."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.files import parse, read_text
from pipeplan.documents.names import STRICT
from pipeplan.documents.profile import Device
from pipeplan.errors import RunFailedError
from pipeplan.protocol.jobs import LinksTask
from worker_agent.engine.processes import OtherNodeError, Place
from worker_agent.engine.torchrun import node_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLink:
    """One rank's measurements: its device, and the link to the next rank; the last rank of several has none."""

    device: Device
    bandwidth_bytes_per_s: float | None
    latency_s: float | None

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """All ranks' measurements, by rank."""

    ranks: tuple[RankLink, ...]

    __pydantic_config__: ClassVar = STRICT


def measure_cluster(folder: Path, task: LinksTask, place: Place | None) -> Cluster | None:
    """Measures between neighbouring ranks, one pair after the other; None on all nodes but the first.

    Raises RunFailedError if a process fails, OtherNodeError if another node is the likely cause.
    """
    found = folder / "measured.json"
    logs = DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL)
    try:
        start = elastic_launch(node_of(place, task.devices, logs), sys.executable)
        start("-m", "worker_agent.profiler.links_rank", str(found), str(task.repeats), str(os.getpid()))
    except SignalException as error:
        raise KeyboardInterrupt from error
    except (ChildFailedError, DistError, RendezvousError) as error:
        kind = RunFailedError if place is None else OtherNodeError
        # the last line that a process wrote to its standard error: of a traceback, the error itself
        texts = [log.read_text(errors="replace").strip() for log in sorted(folder.glob("logs/**/stderr.log"))]
        said = next((text.splitlines()[-1].strip() for text in texts if text), "the processes gave no reason")
        raise kind(f"measuring links failed: {said}; log: {folder / 'logs'}") from error
    if place is not None and place.node_rank > 0:
        return None
    return cluster_of(parse(MeasuredLinks, read_text(found)).ranks, devices=task.devices)


def cluster_of(ranks: tuple[RankLink, ...], *, devices: int) -> Cluster:
    """A cluster of nodes with `devices` devices each: one level inside a node, and one between several nodes.

    Several nodes of one device each have no links inside a node: the only level is the one between the nodes.
    """
    nodes = len(ranks) // devices
    between = list(range(devices - 1, len(ranks) - 1, devices)) if nodes > 1 else []
    inside = [rank for rank in range(len(ranks)) if rank not in between]
    levels = [_level(ranks, inside, devices)] if devices > 1 or nodes == 1 else []
    levels += [_level(ranks, between, nodes)] if nodes > 1 else []
    device = min((rank.device for rank in ranks), key=lambda device: device.memory_bytes)
    return Cluster(device=device, levels=tuple(levels))


def _level(ranks: tuple[RankLink, ...], chosen: list[int], size: int) -> Level:
    links = [ranks[rank] for rank in chosen]
    return Level(
        size=size,
        bandwidth_bytes_per_s=median(link.bandwidth_bytes_per_s for link in links if link.bandwidth_bytes_per_s),
        latency_s=median(link.latency_s for link in links if link.latency_s is not None),
    )
