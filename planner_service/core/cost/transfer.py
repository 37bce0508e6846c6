"""The transfer term: what moves between neighbouring stages, and which level of the network it crosses."""

from collections.abc import Sequence
from math import lcm

import numpy as np

from planner_service.core.cluster import Cluster, Level
from planner_service.core.cost.compute import FloatArray, IntArray
from planner_service.core.plan import Worker


def boundary_bytes(output_bytes: float) -> float:
    """The activations of a boundary and their gradients, which are as large: 2 a_l (PipeDream 2018, section 3.2)."""
    return 2.0 * output_bytes


class Bandwidths:
    """`Cluster.link` for many pairs of devices at once: the bandwidth between devices, from a table by level."""

    def __init__(self, cluster: Cluster) -> None:
        sizes = [level.size for level in cluster.levels]
        self._units = np.cumprod(np.asarray(sizes, dtype=np.int64))[:-1]
        speeds = np.asarray([level.bandwidth_bytes_per_s for level in cluster.levels], dtype=np.float64)
        self._by_level = np.minimum.accumulate(speeds)

    def levels(self, low: IntArray, high: IntArray) -> IntArray:
        """The level (from 0) that the devices low..high, both included, reach up to."""
        crossed = np.zeros(np.broadcast(low, high).shape, dtype=np.int64)
        for unit in self._units:
            crossed += low // unit != high // unit
        return crossed

    def of_levels(self, levels: IntArray) -> FloatArray:
        """The slowest bandwidth up to each level."""
        return self._by_level[levels]

    def spanning(self, low: IntArray, high: IntArray) -> FloatArray:
        """The slowest bandwidth among the devices low..high, both included."""
        return self.of_levels(self.levels(low, high))


def boundary_link(cluster: Cluster, placement: Sequence[Worker], stage: int, replicas: Sequence[int]) -> Level:
    """The slowest link between this stage and the next: minibatches go round robin over the replicas of both."""
    ranks = {worker: rank for rank, worker in enumerate(placement)}
    senders, receivers = replicas[stage], replicas[stage + 1]
    rounds = range(lcm(senders, receivers))
    links = [
        cluster.link(
            (
                ranks[Worker(stage=stage, replica=k % senders)],
                ranks[Worker(stage=stage + 1, replica=k % receivers)],
            )
        )
        for k in rounds
    ]
    return _slowest(links)


def replica_link(cluster: Cluster, placement: Sequence[Worker], stage: int) -> Level:
    """The slowest link among the replicas of a stage."""
    return cluster.link(rank for rank, worker in enumerate(placement) if worker.stage == stage)


def _slowest(links: Sequence[Level]) -> Level:
    return Level(
        size=2,
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in links),
        latency_s=max(link.latency_s for link in links),
    )
