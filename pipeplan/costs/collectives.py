"""The exchange term: what the replicas of a stage send for one update, and how long that outlasts the backward."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.arrays import FloatArray
from pipeplan.costs.transfer import SharedPort
from pipeplan.documents.cluster import Cluster


def parameter_server(replicas: FloatArray) -> FloatArray:
    """4 (m - 1) / m of the weights: gradients out and weights back, sent and received (PipeDream 2018, section 3.2)."""
    return 4.0 * (replicas - 1.0) / replicas


def all_reduce(replicas: FloatArray) -> FloatArray:
    """2 (m - 1) / m of the weights: the ring's reduce-scatter and all-gather."""
    return 2.0 * (replicas - 1.0) / replicas


def in_turn(replicas: FloatArray) -> FloatArray:
    """Once the weights for each replica: under ASP the gradients of each go to all others by themselves."""
    return replicas


EXCHANGES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "parameter-server": parameter_server,
    "all-reduce": all_reduce,
}
"""Weights moved a worker and update, as a share of the stage's, by the name of `Options.synchronisation`."""


@dataclass(frozen=True, slots=True)
class LevelRing:
    """The part of an all-reduce that passes one level: among `members` units, each with this bandwidth.

    A ring sends 2 (n - 1) / n of the bytes in 2 (n - 1) hops, a double binary tree twice the bytes in 2 log2(n) hops
    (Sanders, Speck and Traff 2009, section 3). The faster of the two is taken.
    """

    members: int
    bandwidth_bytes_per_s: float
    latency_s: float
    port: SharedPort

    @property
    def ring_s_per_byte(self) -> float:
        """Of a ring, without its hops."""
        return 2.0 * (self.members - 1) / self.members / self.bandwidth_bytes_per_s

    def seconds(self, size_bytes: float) -> tuple[float, float]:
        """How long its hops take, and its bytes."""
        ring_s = 2 * (self.members - 1) * self.latency_s, size_bytes * self.ring_s_per_byte
        tree_s = 2 * (self.members - 1).bit_length() * self.latency_s, 2.0 * size_bytes / self.bandwidth_bytes_per_s
        return min(ring_s, tree_s, key=sum)


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce among devices, level by level from the inside out (Cho et al. 2019, BlueConnect, section 3).

    The devices of a unit reduce and scatter first, and each exchanges its part with its like in the other units. A
    unit's port thus carries the bytes once, however many of its devices take part, and they use their own links to it
    side by side. Each level has a ring or a tree of its own.
    """

    rings: tuple[LevelRing, ...]

    @cached_property
    def slowest(self) -> LevelRing | None:
        """The level on which the bytes take longest, of equal ones the outermost; None for a single device."""
        return max(reversed(self.rings), key=lambda ring: ring.ring_s_per_byte, default=None)

    def seconds(self, size_bytes: float) -> float:
        """All of it, one level after the other."""
        return sum((sum(ring.seconds(size_bytes)) for ring in self.rings), 0.0)

    def latency_s(self, size_bytes: float) -> float:
        """All hops."""
        return sum((ring.seconds(size_bytes)[0] for ring in self.rings), 0.0)

    def port_s(self, size_bytes: float) -> float:
        """How long the bytes pass the ports of the slowest level."""
        return self.slowest.seconds(size_bytes)[1] if self.slowest else 0.0


def all_reduce_among(cluster: Cluster, devices: Sequence[int]) -> AllReduce:
    """The all-reduce among these devices. Where their units hold different numbers of them, the least number counts."""
    rings = []
    inside, unit = sorted(set(devices)), 1
    beside = 1  # devices that each have a part, in every unit of the level
    for level in cluster.levels:
        units: dict[int, list[int]] = defaultdict(list)
        for member in sorted({device // unit for device in inside}):
            units[member // level.size].append(member)
        members = max(map(len, units.values()))
        if members > 1:
            bandwidth = min(level.bandwidth_bytes_per_s, beside * level.transfer_bytes_per_s)
            rings.append(LevelRing(members, bandwidth, level.latency_s, SharedPort(unit, level.device_share)))
        beside *= min(map(len, units.values()))
        unit *= level.size
        if len(units) == 1:
            break
    return AllReduce(tuple(rings))


FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""The least bytes of the first and of each later bucket, in which gradients are exchanged together: those of torch's
DistributedDataParallel. The first is small to let the exchange begin early.
"""


def outlasting_s(blocks: Iterable[tuple[float, float]], seconds_per_byte: float) -> float:
    """How long an exchange goes on when the backward that it overlaps with has ended.

    `blocks` are a stage's (backward seconds, bytes of weights), from the first to the last. The backward goes through
    them from the last to the first. A bucket leaves when it is complete and the buckets before it have left: wait-free
    backpropagation (PipeDream 2018, section 2).
    """
    through_s = free_s = 0.0
    gathered_bytes, enough_bytes = 0.0, FIRST_BUCKET_BYTES
    for backward_s, weight_bytes in reversed(list(blocks)):
        through_s += backward_s
        gathered_bytes += weight_bytes
        if gathered_bytes >= enough_bytes:
            free_s = max(free_s, through_s) + gathered_bytes * seconds_per_byte
            gathered_bytes, enough_bytes = 0.0, BUCKET_BYTES
    return max(free_s, through_s) + gathered_bytes * seconds_per_byte - through_s
