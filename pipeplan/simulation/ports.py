"""Ports: the ports that a program's routes share. Paths between devices in, each path's ports out.

A search plays the same paths many times, with other stages or batches, and computes their ports once.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

_Port: TypeAlias = tuple[bool, int, int, bool]
"""The direction (True: outwards), the number of devices that share the port, and the number of their unit; last,
whether it is a device's own link to a shared port. Clusters have thousands, and plain tuples are made quickly.
"""


@dataclass(frozen=True, slots=True)
class Way:
    """The paths from each source device to the target at the same index; without a `target`, the ring of all sources.

    `port_devices` share a port (0: there is none); each one's own link has a `share` of its bandwidth.
    """

    source: tuple[int, ...]
    target: tuple[int, ...] | None
    port_devices: int
    share: float

    @property
    def crosses(self) -> bool:
        """Whether the path leaves a unit of devices."""
        pairs = zip(self.source, self.target or (), strict=True)
        return any(a // self.port_devices != b // self.port_devices for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Passed:
    """The share of a port's bandwidth that a transfer takes at full speed, and its ports (`network.Route`)."""

    share: float
    ports: tuple[tuple[int, float], ...]


@lru_cache(maxsize=64)
def shared_ports(ways: tuple[Way, ...]) -> tuple[tuple[Passed, ...], int]:
    """Each path's ports, and the total number of ports."""
    numbers: dict[_Port, int] = {}
    routes = []
    for way in ways:
        share, passed = (way.share, _between(way)) if way.target is not None else _around(way)
        counts = ((port, count / way.share if port[-1] else count) for port, count in passed.items())
        ports = tuple((numbers.setdefault(port, len(numbers)), count) for port, count in counts)
        routes.append(Passed(share=share, ports=ports))
    return _without_spare_ports(routes, len(numbers)), len(numbers)


def _between(way: Way) -> Mapping[_Port, float]:
    """The ports that a rank's transfers to another one pass, each with the number of parallel transfers."""
    shared, pairs = way.port_devices, list(zip(way.source, way.target or (), strict=True))
    passed: dict[_Port, float] = defaultdict(float)
    for (out, into), count in Counter((a // shared, b // shared) for a, b in pairs).items():
        if out != into:
            passed[True, shared, out, False] += count
            passed[False, shared, into, False] += count
    if way.share < 1:
        for source, target in pairs:
            if source // shared != target // shared:
                passed[True, shared, source, True] += 1.0
                passed[False, shared, target, True] += 1.0
    return passed


def _around(way: Way) -> tuple[float, Mapping[_Port, float]]:
    """The same for an exchange, after the share of a port that it takes.

    A ring enters and leaves every unit once, for any number of replicas in it. Each replica carries an equal share of
    it (`costs.collectives`).
    """
    shared, share, passed = way.port_devices, way.share, dict[_Port, float]()
    if shared:
        inside = Counter(device // shared for device in way.source)
        share = min(share * min(inside.values()), 1.0)
        for out in (True, False):
            passed |= {(out, shared, unit, False): 1.0 for unit in sorted(inside)}
            if way.share < 1:
                shares = ((device, 1.0 / inside[device // shared]) for device in way.source)
                passed |= {(out, shared, device, True): part for device, part in shares}
    return share, passed


def _without_spare_ports(routes: Sequence[Passed], ports: int) -> tuple[Passed, ...]:
    """Keeps one of several ports with equal routes and loads, and drops ports that are never full."""
    alike, kinds, taken = [0] * ports, dict[tuple[int, int, float], int](), [0.0]
    for number, route in enumerate(routes):  # so far, the same routes pass all ports of a kind, and take so much
        for port, count in route.ports:
            key = alike[port], number, count
            if key not in kinds:
                kinds[key] = len(taken)
                taken.append(taken[alike[port]] + route.share * count)
            alike[port] = kinds[key]
    first = {kind: port for port, kind in reversed(list(enumerate(alike)))}
    full = {port for kind, port in first.items() if taken[kind] > 1}
    return tuple(Passed(route.share, tuple(each for each in route.ports if each[0] in full)) for route in routes)
