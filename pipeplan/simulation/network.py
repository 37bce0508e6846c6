"""Network: the transfers in transit, and their speeds. Routes and start times in, end times out.

A route leads through ports, out of a sender's unit of devices and into a receiver's. It carries one transfer after
another. Transfers on several routes share a port: its bandwidth is divided max-min fairly. No route can then become
faster unless one that is no faster becomes slower (Bertsekas and Gallager, Data Networks, section 6.5.2). Filling finds
the shares: the rates of all routes rise together, and a route's rate is final once one of its ports is full.

Shares change when a transfer starts or ends, and only on routes that share ports with it, directly or through other
routes. The shares depend only on the set of these routes. In a steady state the same sets recur in every batch, and the
shares of each set are computed once. A set of routes is a whole number here, with bit k for route number k.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

_ROUNDING = 1e-12
"""A port counts as full within this share of its bandwidth."""

_MOST_SETS = 20_000
"""Upper bound on the cached sets of routes with their shares."""


@dataclass(slots=True, eq=False)
class Route:
    """A path through ports, and the transfers on it."""

    number: int
    share: float = 1.0
    """The share of a port's bandwidth that a transfer takes at full speed."""

    ports: tuple[tuple[int, float], ...] = ()
    """The ports that it passes, each with the number of equal parallel transfers that the route represents; 1/k if a
    device carries one k-th of it.
    """

    carried: object | None = None
    """The transfer on the route."""

    waiting: deque[tuple[object, float]] = field(default_factory=deque)
    """The queued transfers."""

    near: int = 0
    """The set of the other routes through these ports."""

    alone: float = 1.0
    """The speed of a transfer that has all its ports to itself."""

    speed: float = 0.0
    """The speed of the transfer on the route."""

    left_s: float = 0.0
    """The rest of it, in seconds at full speed."""

    since_s: float = 0.0
    stamp: int = 0
    bit: int = field(init=False)
    """The set of this route alone."""

    def __post_init__(self) -> None:
        self.bit = 1 << self.number

    def full_alone(self) -> float:
        """The speed of a transfer that has all its ports to itself."""
        return min([1.0, *(1.0 / (self.share * count) for _, count in self.ports)])


class Network:
    """Carries transfers on routes, numbered from 0. Time moves forward from call to call.

    `ends` is a heap of arrival times. The first is the next arrival; others may be out of date. The last is never
    reached. `busy` is the set of routes that carry a transfer.
    """

    def __init__(self, routes: Sequence[Route], ports: int) -> None:
        self._routes = routes
        self.ends: list[tuple[float, int, int, Route]] = [(inf, -1, 0, Route(number=len(routes)))]
        self.busy = 0
        self.changed = 0
        self._speeds: dict[int, tuple[tuple[Route, float], ...]] = {}
        through = [0] * ports
        for route in routes:
            for port, _ in route.ports:
                through[port] |= route.bit
        for route in routes:
            route.alone = route.full_alone()
            for port, _ in route.ports:
                route.near |= through[port] & ~route.bit

    def start(self, route: Route, thing: object, seconds: float, now_s: float) -> None:
        """Puts a transfer that takes `seconds` at full speed on a route, or in the route's queue."""
        if route.carried is not None:
            route.waiting.append((thing, seconds))
            return
        route.carried, route.left_s, route.since_s, route.speed = thing, seconds, now_s, 0.0
        if self.busy & route.near:
            self.changed |= route.bit
        else:
            route.speed = route.alone
            route.stamp += 1
            heappush(self.ends, (now_s + seconds / route.alone, route.number, route.stamp, route))
        self.busy |= route.bit

    def arrived(self) -> tuple[object, float]:
        """Removes the next transfer from its route, which continues with the one that waits. Returns the transfer, and
        when it arrived.
        """
        end_s, number, _, route = heappop(self.ends)
        thing = route.carried
        route.carried = None
        route.stamp += 1
        if route.waiting:  # the ports are as busy as before
            follower, seconds = route.waiting.popleft()
            route.carried, route.left_s, route.since_s = follower, seconds, end_s
            heappush(self.ends, (end_s + seconds / route.speed, number, route.stamp, route))
        else:
            self.busy ^= route.bit
            self.changed = (self.changed | route.near) & self.busy
        ends = self.ends
        while ends[0][2] != ends[0][3].stamp:
            heappop(ends)
        return thing, end_s

    def share_out(self, now_s: float) -> None:
        """Divides anew the ports that transfers entered or left at this instant. No end is read before that."""
        while self.changed:
            sharing = self._sharing(self.changed & -self.changed)
            self.changed &= ~sharing
            for route, speed in self._speeds_of(sharing):
                if speed == route.speed:
                    continue
                route.left_s -= route.speed * (now_s - route.since_s)
                route.since_s, route.speed = now_s, speed
                route.stamp += 1
                heappush(self.ends, (now_s + max(route.left_s, 0.0) / speed, route.number, route.stamp, route))
        ends = self.ends
        while ends[0][2] != ends[0][3].stamp:
            heappop(ends)

    def _sharing(self, route: int) -> int:
        """All routes that share ports with this one, directly or through others, including itself."""
        found = left = route
        while left:
            first = left & -left
            fresh = self._routes[first.bit_length() - 1].near & self.busy & ~found
            found |= fresh
            left = left ^ first | fresh
        return found

    def _speeds_of(self, sharing: int) -> tuple[tuple[Route, float], ...]:
        """The shared speeds of these routes, all that share ports with each other."""
        if sharing not in self._speeds:
            if len(self._speeds) == _MOST_SETS:
                self._speeds.clear()
            routes = [route for route in self._routes if sharing >> route.number & 1]
            self._speeds[sharing] = tuple(zip(routes, shared_speeds(routes), strict=True))
        return self._speeds[sharing]


def shared_speeds(routes: Sequence[Route]) -> list[float]:
    """The max-min fair speeds of routes that all carry a transfer, each at most 1."""
    if len(routes) == 1:
        return [routes[0].alone]
    speeds = [0.0] * len(routes)
    crowd: dict[int, float] = defaultdict(float)
    for route in routes:
        for port, count in route.ports:
            crowd[port] += count
    room = dict.fromkeys(crowd, 1.0)
    growing = list(range(len(routes)))
    while growing:
        level, full = _next_full(room, crowd, min([routes[index].share for index in growing]))
        still = []
        for index in growing:
            route = routes[index]
            if route.share > level * (1 + _ROUNDING) and not any(port in full for port, _ in route.ports):
                still.append(index)
                continue
            speeds[index] = min(level / route.share, 1.0)
            taken = speeds[index] * route.share
            for port, count in route.ports:
                room[port] -= taken * count
                crowd[port] -= count
        growing = still
    return speeds


def _next_full(room: Mapping[int, float], crowd: Mapping[int, float], most: float) -> tuple[float, set[int]]:
    """The rate up to which all growing routes can grow: `most`, or until a port is full; and the ports that are then
    full.

    `room` is the remaining share of each port, `crowd` the number of growing routes that pass it.
    """
    filled = {port: room[port] / count for port, count in crowd.items() if count > _ROUNDING}
    level = min([most, *filled.values()])
    return level, {port for port, at in filled.items() if at <= level * (1 + _ROUNDING)}
