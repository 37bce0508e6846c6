"""The transfer term: the tensors between neighbouring stages, and the links and ports that they pass.

A port is where transfers leave and enter a server or a single device. There they share a level's bandwidth.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, lcm

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.plan import Worker


def boundary_bytes(output_bytes: float) -> float:
    """The activations of a boundary and their gradients, which are as large: 2 a_l (PipeDream 2018, section 3.2)."""
    return 2.0 * output_bytes


class Bandwidths:
    """Bandwidths between many pairs of devices at once, as `Cluster.link` gives them for one pair.

    `units` are the devices in one unit of each level, without the outermost level.
    """

    def __init__(self, cluster: Cluster) -> None:
        sizes = [level.size for level in cluster.levels]
        self.units = np.cumprod(np.asarray(sizes, dtype=np.int64))[:-1]
        speeds = np.asarray([level.transfer_bytes_per_s for level in cluster.levels], dtype=np.float64)
        self._by_level = np.minimum.accumulate(speeds)

    def levels(self, low: IntArray, high: IntArray) -> IntArray:
        """The outermost level (from 0) that the devices low..high, both included, span."""
        crossed = np.zeros(np.broadcast(low, high).shape, dtype=np.int64)
        for unit in self.units:
            crossed += low // unit != high // unit
        return crossed

    def of_levels(self, levels: IntArray) -> FloatArray:
        """The slowest bandwidth up to each level."""
        return self._by_level[levels]

    def spanning(self, low: IntArray, high: IntArray) -> FloatArray:
        """The slowest bandwidth among the devices low..high, both included."""
        return self.of_levels(self.levels(low, high))


def ranks_by_stage(placement: Sequence[Worker]) -> tuple[tuple[int, ...], ...]:
    """By each stage that the placement lists, its ranks, by replica."""
    ranks: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, worker in enumerate(placement):
        ranks[worker.stage][worker.replica] = rank
    return tuple(tuple(ranks[stage][r] for r in sorted(ranks[stage])) for stage in sorted(ranks))


def ranks_of_stages(placement: Sequence[Worker], depth: int, *, in_v: bool) -> tuple[tuple[int, ...], ...]:
    """By each of `depth` stages its ranks, by replica, where the placement lists only the first stages of the ranks.

    Further stages start from the first rank again, or in a V go back from the last one.
    """
    ranks = ranks_by_stage(placement)
    span = len(ranks)
    return tuple(ranks[2 * span - 1 - s if in_v and s >= span else s % span] for s in range(depth))


@dataclass(frozen=True, slots=True)
class SharedPort:
    """A port: the number of devices that share it (0: there is no port), and one device's share of its bandwidth."""

    devices: int = 0
    device_share: float = 1.0


def shared_port(cluster: Cluster, ranks: Sequence[int]) -> SharedPort:
    """The port at which a transfer among these ranks is slowest.

    A level's bandwidth is that at which one unit of the level inside it, a server or a device, sends or receives.
    Among equally slow levels the port is the outermost level's, which the most devices share.
    """
    unit, found, slowest = 1, SharedPort(), inf
    for level in cluster.levels:
        if level.transfer_bytes_per_s <= slowest:
            slowest, found = level.transfer_bytes_per_s, SharedPort(unit, level.device_share)
        unit *= level.size
        if min(ranks) // unit == max(ranks) // unit:
            break
    return found


def boundary_crossings(
    cluster: Cluster, boundaries: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[tuple[Level, SharedPort]]:
    """By the ranks of two neighbouring stages, the slowest link between them, and its port.

    These are of the farthest sender and receiver: minibatches go round robin over the replicas of both. Pairs that are
    equally far have the same.
    """
    bandwidths, found = Bandwidths(cluster), dict[int, tuple[Level, SharedPort]]()
    units = [int(unit) for unit in bandwidths.units]
    for senders, receivers in boundaries:
        pair = [senders[0], receivers[0]]
        if len(senders) > 1 or len(receivers) > 1:
            rounds = np.arange(lcm(len(senders), len(receivers)))
            ends = [np.asarray(ranks)[rounds % len(ranks)] for ranks in (senders, receivers)]
            farthest = int(bandwidths.levels(np.minimum(*ends), np.maximum(*ends)).argmax())
            pair = [int(ranks[farthest]) for ranks in ends]
        crossed = sum(pair[0] // unit != pair[1] // unit for unit in units)
        if crossed not in found:
            found[crossed] = replace(cluster.link(pair), size=2), shared_port(cluster, pair)
        yield found[crossed]
