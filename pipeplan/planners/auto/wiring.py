"""Wiring: a placement, and its traffic on the network."""

from dataclasses import dataclass
from math import prod

import numpy as np

from pipeplan.arrays import FloatArray
from pipeplan.costs.collectives import AllReduce, all_reduce_among
from pipeplan.costs.transfer import Bandwidths
from pipeplan.documents.cluster import Cluster
from pipeplan.planners.two_bw.placements import Links


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wiring:
    """A placement, and what crosses the network on it."""

    links: Links
    """The ranks of the placement, and the bandwidths of its boundaries."""

    edge_s_per_byte: float
    """Seconds a byte, as a sum over the boundaries, in both directions."""

    edge_latency_s: float
    """Latency, as a sum over the boundaries, in both directions."""

    exchange: AllReduce
    """The gradient exchange of stage 0's replicas."""

    ring_stages: float
    """How many stages' exchanges pass a port of the exchange's slowest level, on average over all its units."""

    ring_s_per_byte: float
    """What these take at a port of the outermost level at least, by bytes of the model; 0 if another is slowest."""

    crossing: int
    """How many transfers of a microbatch pass the busiest port of the slowest level in one direction."""

    port_s_per_byte: float
    """What each of them takes there."""

    latencies_s: FloatArray
    """By boundary, the latency in one direction."""


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
