"""Wiring: a placement, and its traffic on the network."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.collectives import AllReduce, all_reduce_among, all_reduces_among
from pipeplan.costs.transfer import Bandwidths
from pipeplan.documents.cluster import Cluster
from pipeplan.planners.two_bw.placements import Links


@dataclass(frozen=True, kw_only=True, eq=False)
class Wiring:
    """A placement, and what crosses the network on it."""

    cluster: Cluster
    links: Links
    """The ranks of the placement, and the bandwidths of its boundaries."""

    edge_s_per_byte: float
    """Seconds a byte, as a sum over the boundaries, in both directions."""

    edge_latency_s: float
    """Latency, as a sum over the boundaries, in both directions."""

    exchange: AllReduce
    """The gradient exchange of stage 0's replicas."""

    ring_stages: float
    """The stages whose exchanges pass a port of the exchange's slowest level, on average over all its units."""

    ring_s_per_byte: float
    """Lower bound on their seconds a byte of the model at a port of the outermost level; 0 if another is slowest."""

    crossing: int
    """The transfers of a microbatch that pass the busiest port of the slowest level in one direction."""

    port_s_per_byte: float
    """Seconds a byte of each of them there."""

    latencies_s: FloatArray
    """By boundary, the latency in one direction."""

    @cached_property
    def ports(self) -> "Ports":
        """The traffic of each port: computed when it is first needed, because large clusters have many wirings."""
        return _ports_of(self.cluster, self.links)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ports:
    """The traffic of a placement's ports (`bound`, 6).

    `hop_s_per_byte`: by boundary, the least seconds a byte there and back, because all replicas send at once.
    `sent_s_per_byte`: [port, boundary], the seconds that a byte of a boundary takes of a port in each direction.
    `exchanged_s_per_byte`: [port, stage], the same of a byte of a stage's weights.
    """

    hop_s_per_byte: FloatArray
    sent_s_per_byte: FloatArray
    exchanged_s_per_byte: FloatArray


def _ports_of(cluster: Cluster, links: Links) -> Ports:
    """The ports of these links. A transfer passes that of the slowest level it reaches, the outermost of equal ones."""
    ranks, edges, levels = links.ranks, len(links.edges), cluster.levels
    hop_s = 2.0 / links.edges
    loads: dict[int, list[_Load]] = defaultdict(list)  # by the devices behind a port
    low, high = np.minimum(ranks[:-1], ranks[1:]), np.maximum(ranks[:-1], ranks[1:])
    reached = Bandwidths(cluster).levels(low, high).max(axis=1)
    speeds = [level.transfer_bytes_per_s for level in levels]
    until = [min(range(last, -1, -1), key=speeds.__getitem__) for last in range(len(levels))]
    slowest = np.asarray(until, dtype=np.int64)[reached]
    for level in dict.fromkeys(slowest.tolist()):
        at = np.flatnonzero(slowest == level)
        unit, share = prod(each.size for each in levels[:level]), levels[level].device_share
        out, into = ranks[at] // unit, ranks[at + 1] // unit
        for side in (out, into):
            cells, times = np.unique((side * edges + at[:, None])[out != into], return_counts=True)
            ports, boundaries = np.divmod(cells, edges)
            np.maximum.at(hop_s, boundaries, 2.0 / links.edges[boundaries] * share * times)
            loads[unit].append((ports, boundaries, times * (share / links.edges[boundaries])))
    for stage, exchange in enumerate(all_reduces_among(cluster, ranks) if ranks.shape[1] > 1 else ()):
        ring = exchange.slowest
        if ring is not None:
            times = np.bincount(ranks[stage] // ring.port.devices)
            share = min(ring.port.device_share * int(times[times > 0].min()), 1.0)
            ports = np.flatnonzero(times)
            loads[ring.port.devices].append(
                (ports, np.full_like(ports, edges + stage), np.full(len(ports), ring.ring_s_per_byte * share))
            )
    table = _table(list(loads.values()), edges + len(ranks))
    return Ports(hop_s_per_byte=hop_s, sent_s_per_byte=table[:, :edges], exchanged_s_per_byte=table[:, edges:])


_Load: TypeAlias = tuple[IntArray, IntArray, FloatArray]
"""Different pairs of a port and a boundary or stage that loads it, and the seconds a byte."""


def _table(loads: Sequence[Sequence[_Load]], columns: int) -> FloatArray:
    """[port, boundary or stage]: the sums of the loads, which are listed by kind of port; no port without any."""
    numbered = [np.unique(np.concatenate([ports for ports, _, _ in each]), return_inverse=True) for each in loads]
    firsts = np.cumsum([0, *(len(used) for used, _ in numbered)])
    table = np.zeros((firsts[-1], columns))
    for each, first, (_, rows) in zip(loads, firsts, numbered, strict=False):
        ends = np.cumsum([len(ports) for ports, _, _ in each])
        for (_, column, seconds), row in zip(each, np.split(rows, ends[:-1]), strict=True):
            table[first + row, column] += seconds
    return table


def wiring_of(cluster: Cluster, links: Links) -> Wiring:
    """The traffic on these links."""
    ranks = links.ranks
    exchange = all_reduce_among(cluster, ranks[0].tolist())
    bandwidths = Bandwidths(cluster)
    low, high = np.minimum(ranks[:-1], ranks[1:]), np.maximum(ranks[:-1], ranks[1:])
    latencies = np.maximum.accumulate([level.latency_s for level in cluster.levels])
    latencies_s = np.asarray(latencies[bandwidths.levels(low, high).max(axis=1)]) if len(ranks) > 1 else np.zeros(0)

    ring_stages = ring_s_per_byte = 0.0
    if exchange.slowest is not None:
        port = exchange.slowest.port
        of_stages = np.sort(ranks // port.devices, axis=1)
        units = 1 + np.count_nonzero(np.diff(of_stages, axis=1), axis=1)
        every = 1 + int(of_stages.max())
        ring_stages = int(units[units > 1].sum()) / every
        outermost = prod(level.size for level in cluster.levels[:-1])
        if port.devices == outermost:
            # A ring of n units loads each port with 2 (n - 1) / n of its bytes: all ports together, 2 (n - 1).
            ring_s_per_byte = 2 * (int(units.min()) - 1) / every / cluster.levels[-1].bandwidth_bytes_per_s
    slowest = min(range(len(cluster.levels)), key=lambda level: cluster.levels[level].bandwidth_bytes_per_s)
    unit = prod(level.size for level in cluster.levels[:slowest])
    sends = ranks[:-1] // unit
    leaving = np.bincount(sends[sends != ranks[1:] // unit], minlength=1)
    return Wiring(
        cluster=cluster,
        links=links,
        edge_s_per_byte=float((2.0 / links.edges).sum()),
        edge_latency_s=2.0 * float(latencies_s.sum()),
        exchange=exchange,
        ring_stages=ring_stages,
        ring_s_per_byte=ring_s_per_byte,
        crossing=int(leaving.max()),
        port_s_per_byte=1.0 / cluster.levels[slowest].bandwidth_bytes_per_s,
        latencies_s=latencies_s,
    )
