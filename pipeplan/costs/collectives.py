"""The exchange term: the bytes that a stage's replicas send for one update, and the time beyond the backward."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.transfer import SharedPort
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.collectives import CollectiveShares


def parameter_server(replicas: FloatArray) -> FloatArray:
    """4 (m - 1) / m of the weights: gradients out and weights back, sent and received (PipeDream 2018, section 3.2)."""
    return 4.0 * (replicas - 1.0) / replicas


def all_reduce(replicas: FloatArray) -> FloatArray:
    """2 (m - 1) / m of the weights: the ring's reduce-scatter and all-gather."""
    return 2.0 * (replicas - 1.0) / replicas


def in_turn(replicas: FloatArray) -> FloatArray:
    """The weights' bytes, once for each replica: under ASP every replica sends its own gradients to all others."""
    return replicas


EXCHANGES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "parameter-server": parameter_server,
    "all-reduce": all_reduce,
}
"""Bytes moved by a worker for an update, as a share of the weights, by the name of `Options.synchronisation`."""


@dataclass(frozen=True, slots=True)
class LevelRing:
    """The part of an all-reduce that passes one level: among `members` units, each with this bandwidth.

    A ring sends 2 (n - 1) / n of the bytes in 2 (n - 1) hops, a double binary tree twice the bytes in 2 log2(n) hops
    (Sanders, Speck and Traff 2009, section 3). The faster of the two is taken, unless all-reduces were `measured`.
    """

    members: int
    bandwidth_bytes_per_s: float
    latency_s: float
    port: SharedPort
    measured: CollectiveShares | None = None

    @property
    def ring_s_per_byte(self) -> float:
        """Seconds a byte of a ring, without its hops."""
        share = self.measured.bulk_share if self.measured else 1.0
        return 2.0 * (self.members - 1) / self.members / (share * self.bandwidth_bytes_per_s)

    def seconds(self, size_bytes: float) -> tuple[float, float]:
        """The seconds of its hops, and of its bytes."""
        if self.measured:
            port_bytes = 2.0 * (self.members - 1) / self.members * size_bytes
            return self.measured.seconds(self.members, port_bytes, self.bandwidth_bytes_per_s)
        ring_s = 2 * (self.members - 1) * self.latency_s, size_bytes * self.ring_s_per_byte
        tree_s = 2 * (self.members - 1).bit_length() * self.latency_s, 2.0 * size_bytes / self.bandwidth_bytes_per_s
        return min(ring_s, tree_s, key=sum)


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce among devices, level by level from the inside out (Cho et al. 2019, BlueConnect, section 3).

    The devices of a unit reduce and scatter first. Each then exchanges its part with the devices that hold the same
    part in the other units. A unit's port thus carries the bytes once, for any number of its devices, and the devices
    use their own links to the port at the same time. Each level has its own ring or tree.
    """

    rings: tuple[LevelRing, ...]

    @cached_property
    def slowest(self) -> LevelRing | None:
        """The level on which the bytes take longest, the outermost of equal ones; None for a single device."""
        return max(reversed(self.rings), key=lambda ring: ring.ring_s_per_byte, default=None)

    @property
    def port(self) -> SharedPort:
        """The port that the bytes pass on the slowest level; no port for a single device."""
        return self.slowest.port if self.slowest else SharedPort()

    def seconds(self, size_bytes: float) -> float:
        """The whole all-reduce, one level after the other."""
        return sum((sum(ring.seconds(size_bytes)) for ring in self.rings), 0.0)

    def latency_s(self, size_bytes: float) -> float:
        """The seconds of all hops."""
        return sum((ring.seconds(size_bytes)[0] for ring in self.rings), 0.0)

    def port_s(self, size_bytes: float) -> float:
        """How long the bytes pass the ports of the slowest level."""
        return self.slowest.seconds(size_bytes)[1] if self.slowest else 0.0


def all_reduce_among(cluster: Cluster, devices: Sequence[int]) -> AllReduce:
    """The all-reduce among these devices. If their units hold different numbers of them, the smallest counts."""
    rings = []
    inside, unit = sorted(set(devices)), 1
    beside = 1  # devices with a part each, in every unit of the level
    for level in cluster.levels:
        units: dict[int, list[int]] = defaultdict(list)
        for member in sorted({device // unit for device in inside}):
            units[member // level.size].append(member)
        members = max(map(len, units.values()))
        if members > 1:
            bandwidth = min(level.bandwidth_bytes_per_s, beside * level.transfer_bytes_per_s)
            measured = level.collectives.all_reduce if level.collectives else None
            rings.append(LevelRing(members, bandwidth, level.latency_s, SharedPort(unit, level.device_share), measured))
        beside *= min(map(len, units.values()))
        unit *= level.size
        if len(units) == 1:
            break
    return AllReduce(tuple(rings))


def all_reduces_among(cluster: Cluster, ranks: IntArray) -> list[AllReduce]:
    """The all-reduces among the devices of each row. Rows that differ by a shift of whole outermost units share one."""
    unit = prod(level.size for level in cluster.levels[:-1])
    rows = (ranks - ranks.min(axis=1, keepdims=True) // unit * unit).tolist()
    known = {row: all_reduce_among(cluster, row) for row in set(map(tuple, rows))}
    return [known[tuple(row)] for row in rows]


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """An exchange through servers on the replicas' devices, each with an equal share of the weights.

    A worker sends gradients to the others' servers and gets weights back (PipeDream 2018, section 3.2), over two hops.
    All levels carry at once. `s_per_byte` is that of the slowest, whose `port` is passed.
    """

    s_per_byte: float
    hops_s: float
    port: SharedPort

    def seconds(self, size_bytes: float) -> float:
        """The seconds of its hops and its bytes."""
        return self.hops_s + self.port_s(size_bytes)

    def latency_s(self, size_bytes: float) -> float:
        """Both hops, for any number of bytes."""
        return self.hops_s

    def port_s(self, size_bytes: float) -> float:
        """How long the bytes pass the ports of the slowest level."""
        return size_bytes * self.s_per_byte


def parameter_server_among(cluster: Cluster, devices: Sequence[int]) -> ParameterServer:
    """The exchange through servers on these m devices.

    Units do not reduce inside. The port of a unit with k of the devices carries 2 k (m - k) / m of the bytes in each
    direction: gradients of its workers and weights of its servers go out, and as much comes in. Of equally slow levels
    the outermost counts. If units hold different numbers of devices, the time is that of the smallest number.
    """
    members, unit = set(devices), 1
    s_per_byte, hops_s, port = 0.0, 0.0, SharedPort()
    for level in cluster.levels:
        inside = Counter(device // unit for device in members)
        if len(inside) == 1:
            break
        carried = max(2.0 * count * (len(members) - count) / len(members) for count in inside.values())
        together = min(level.bandwidth_bytes_per_s, min(inside.values()) * level.transfer_bytes_per_s)
        hops_s = max(hops_s, 2 * level.latency_s)
        if carried / together >= s_per_byte:
            s_per_byte, port = carried / together, SharedPort(unit, level.device_share)
        unit *= level.size
    return ParameterServer(s_per_byte, hops_s, port)


AMONG: dict[str, Callable[[Cluster, Sequence[int]], AllReduce | ParameterServer]] = {
    "parameter-server": parameter_server_among,
    "all-reduce": all_reduce_among,
}
"""The exchanges as they are played, by the name of `Options.synchronisation`."""


FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""The least bytes of the first and of each later bucket, in which gradients are exchanged together: those of torch's
DistributedDataParallel. The first is small to let the exchange begin early.
"""


def outlasting_s(blocks: Iterable[tuple[float, float]], seconds_per_byte: float) -> float:
    """Seconds for which an exchange continues after the end of the backward that it overlaps.

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
