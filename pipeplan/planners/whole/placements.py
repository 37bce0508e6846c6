"""Placements: the number of neighbouring replicas of a stage, from all of them to one.

`inside` replicas of a rank stand in a row, then `inside` of the pipeline's next rank. After the last rank, the next
`inside` replicas follow. If `inside` is the number of replicas, replicas are neighbours; if it is 1, pipelines are in a
row. With a number in between, replicas share a server, a rack, or both, and the pipeline spans the rest
(`two_bw.placements.mixtures` has the numbers that fill units of devices).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from pipeplan.arrays import FloatArray, IntArray
from pipeplan.costs.collectives import AllReduce, all_reduce_among
from pipeplan.costs.groups import grouped
from pipeplan.costs.transfer import Bandwidths, shared_port
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.forms import Form
from pipeplan.documents.plan import Worker
from pipeplan.errors import InvalidInputError


def placement(ranks: int, replicas: int, *, inside: int) -> tuple[Worker, ...]:
    """The workers in order; `inside` divides the replicas. A rank's first stage stands for it."""
    return tuple(
        Worker(stage=rank, replica=replica)
        for first in range(0, replicas, inside)
        for rank in range(ranks)
        for replica in range(first, first + inside)
    )


@lru_cache(maxsize=65536)
def most_sent(cluster: Cluster, ranks: int, replicas: int, chunks: int, *, inside: int) -> int:
    """The maximum number of messages that leave a unit of the outermost level, when every replica sends a microbatch.

    If ranks hold several stages, the last rank also sends to the first, once less. Gradients come back the same way.
    """
    devices = _devices(ranks, replicas, inside)
    units = devices // prod(level.size for level in cluster.levels[:-1])
    onward = np.roll(units, -1, axis=0)
    count = np.full((ranks, 1), chunks) - (np.arange(ranks) == ranks - 1)[:, None]
    crossing = (units != onward) * count
    sent = np.bincount(units.ravel(), crossing.ravel()) + np.bincount(onward.ravel(), crossing.ravel())
    return int(sent.max())


def _devices(ranks: int, replicas: int, inside: int) -> IntArray:
    """[rank, replica]: the device of each, in ascending order."""
    shape = replicas // inside, ranks, inside
    return np.arange(ranks * replicas).reshape(shape).transpose(1, 0, 2).reshape(ranks, replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedExchange:
    """Seconds a byte of the exchanges, one all-reduce among the replicas of each rank.

    `least_rank` is that of the rank whose replicas are closest. `even` is the time if ranks have equal shares and
    exchange at the same time.
    """

    least_rank: float = 0.0
    even: float = 0.0


@lru_cache(maxsize=65536)
def placed_exchange(cluster: Cluster, ranks: int, replicas: int, *, inside: int) -> PlacedExchange:
    """The exchanges' times on a placement, by rings and without hops (`costs.collectives`)."""
    if replicas == 1:
        return PlacedExchange()
    devices = _devices(ranks, replicas, inside)
    units = np.cumprod([1, *(level.size for level in cluster.levels)])
    bandwidths = {
        unit: level.bandwidth_bytes_per_s for unit, level in zip(units.tolist(), cluster.levels, strict=False)
    }
    outermost, known = int(units[-2]), dict[bytes, AllReduce]()
    every_s, slowest_s, ports = [], [], dict[int, FloatArray]()
    for row in devices:
        pattern = (row - row[0] // outermost * outermost).tobytes()  # a shift by whole units changes nothing
        if pattern not in known:
            known[pattern] = all_reduce_among(cluster, row.tolist())
        among = known[pattern]
        ring = among.slowest
        assert ring is not None, "there are several replicas"
        occupied = ring.ring_s_per_byte * ring.bandwidth_bytes_per_s / bandwidths[ring.port.devices]
        passed = np.unique(row // ring.port.devices)
        carried = ports.setdefault(ring.port.devices, np.zeros(-(-devices.size // ring.port.devices)))
        carried[passed] += occupied
        every_s.append(sum(each.ring_s_per_byte for each in among.rings))
        slowest_s.append(ring.ring_s_per_byte)
    busiest = max(float(each.max()) for each in ports.values())
    rest = max(every - slowest for every, slowest in zip(every_s, slowest_s, strict=True))
    return PlacedExchange(
        least_rank=min(every_s),
        even=max(max(every_s), busiest + rest) / ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hops:
    """The transfer time of a microbatch from each rank of a pipeline to the last one, in one direction.

    Each rank has an entry: the latency, and the seconds a byte that ranks send on.
    """

    latency_s: FloatArray
    s_per_byte: FloatArray

    def after_s(self, size_bytes: float) -> FloatArray:
        """Seconds from each rank to the last one."""
        return self.latency_s + self.s_per_byte * size_bytes


@lru_cache(maxsize=65536)
def hops_on(cluster: Cluster, ranks: int, replicas: int, *, inside: int) -> Hops:
    """The hops of a placement.

    All replicas send at once, as in a play: replicas with a common port share it.
    """
    devices = _devices(ranks, replicas, inside)
    crossed = Bandwidths(cluster).levels(devices[:-1], devices[1:])
    latency_s, s_per_byte = np.zeros(ranks), np.zeros(ranks)
    for boundary, farthest in enumerate(crossed.argmax(axis=1).tolist()):
        pair = devices[boundary : boundary + 2, farthest].tolist()
        link, port = cluster.link(pair), shared_port(cluster, pair)
        units = devices[boundary : boundary + 2] // port.devices
        together = max(int(np.bincount(own[units[0] != units[1]]).max(initial=0)) for own in units)
        latency_s[boundary] = link.latency_s
        s_per_byte[boundary] = max(1.0, together * port.device_share) / link.bandwidth_bytes_per_s
    return Hops(latency_s=np.cumsum(latency_s[::-1])[::-1], s_per_byte=np.cumsum(s_per_byte[::-1])[::-1])


def placements(cluster: Cluster, ranks: int, replicas: int, *, together: int = 1) -> tuple[int, ...]:
    """The values of `inside` that differ in the links that transfers and exchanges cross, all replicas first.

    Only multiples of `together` count. Two placements with the same crossings on every level cost the same.
    """
    found: dict[bytes, int] = {}
    for inside in _candidates(cluster, ranks, replicas):
        if inside % together == 0:
            found.setdefault(_crossings(cluster, ranks, replicas, inside), inside)
    return tuple(found.values())


def _candidates(cluster: Cluster, ranks: int, replicas: int) -> Iterator[int]:
    """All replicas, one, and every divisor of them that is no larger than an outermost unit."""
    yield replicas
    if ranks > 1 and replicas > 1:
        yield 1
        largest = prod(level.size for level in cluster.levels[:-1])
        yield from (inside for inside in range(2, min(replicas - 1, largest) + 1) if replicas % inside == 0)


def _crossings(cluster: Cluster, ranks: int, replicas: int, inside: int) -> bytes:
    """By boundary: the level up to which its transfers reach, and the number that leaves a unit. By rank of the
    pipeline: the number of units of every level that hold its replicas, and their minimum and maximum in a unit.
    """
    devices = _devices(ranks, replicas, inside)
    low, high = np.minimum(devices[:-1], devices[1:]), np.maximum(devices[:-1], devices[1:])
    seen = [Bandwidths(cluster).levels(low, high).max(axis=1)] if ranks > 1 else []
    unit = 1
    for level in cluster.levels[:-1]:
        unit *= level.size
        units = np.sort(devices // unit, axis=1)
        seen.append(np.count_nonzero(devices[:-1] // unit != devices[1:] // unit, axis=1))
        runs = [np.unique(row, return_counts=True)[1] for row in units]
        seen.append(np.asarray([(len(counts), counts.min(), counts.max()) for counts in runs]).ravel())
    return b" ".join(each.astype(np.int64).tobytes() for each in seen)


def lies_well(cluster: Cluster, form: Form) -> bool:
    """Whether the cluster's levels hold whole groups of the form."""
    try:
        grouped(cluster, form.devices)
    except InvalidInputError:
        return False
    return True
