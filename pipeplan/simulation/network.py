"""Network: what is on its way, and how fast. Routes and moments in, ends out.

A route leads through ports, out of a sender's unit of devices and into a receiver's, and carries one thing after
another. Things on several routes share a port: its bandwidth is divided max-min fairly. No route can then be faster
unless one that is no faster becomes slower (Bertsekas and Gallager, Data Networks, section 6.5.2). Shares are found by
filling: all routes become faster together, and a route stays as it is once a port of its is full.

Shares change when a thing starts or ends. Only routes that share ports with it, directly or by way of others, are then
looked at.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

_ROUNDING = 1e-12
"""Ports that are full within this share of their bandwidth are full."""


@dataclass(slots=True, eq=False)
class Route:
    """A way through ports.

    `share`: of a port's bandwidth, what a thing takes at full speed. `ports`: those that it passes, each with the
    number of equal things that pass there side by side, for which the route stands; 1/k where a device carries one
    k-th of it. `speed` and `left_s` are those of the thing on its way; `waiting` holds those that follow it.
    """

    number: int
    share: float = 1.0
    ports: tuple[tuple[int, float], ...] = ()
    carried: object | None = None
    waiting: deque[tuple[object, float]] = field(default_factory=deque)
    alone: float = 1.0
    speed: float = 0.0
    left_s: float = 0.0
    since_s: float = 0.0
    stamp: int = 0

    def full_alone(self) -> float:
        """The speed of what has all its ports for itself."""
        return min([1.0, *(1.0 / (self.share * count) for _, count in self.ports)])


class Network:
    """Carries things on routes. Time passes from call to call, and never back."""

    def __init__(self, routes: Iterable[Route], ports: int) -> None:
        self._on_port: list[dict[int, Route]] = [{} for _ in range(ports)]
        self._ends: list[tuple[float, int, int, Route]] = []
        self._changed: dict[int, Route] = {}
        for route in routes:
            route.alone = route.full_alone()

    def next_end_s(self) -> float:
        """When the next thing arrives; infinite where nothing is on its way."""
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].stamp:
            heappop(ends)
        return ends[0][0] if ends else float("inf")

    def start(self, route: Route, thing: object, seconds: float, now_s: float) -> None:
        """Puts a thing that takes so many seconds at full speed on a route, or in its queue."""
        if route.carried is not None:
            route.waiting.append((thing, seconds))
            return
        route.carried, route.left_s, route.since_s, route.speed = thing, seconds, now_s, 0.0
        alone = True
        for port, _ in route.ports:
            others = self._on_port[port]
            if others:
                alone = False
            others[route.number] = route
        if alone:
            route.speed = route.alone
            route.stamp += 1
            heappush(self._ends, (now_s + seconds / route.alone, route.number, route.stamp, route))
        else:
            self._changed[route.number] = route

    def arrived(self) -> tuple[object, float]:
        """Takes the next thing off its route, which goes on with the one that waits; returns the thing, and when."""
        end_s, number, _, route = heappop(self._ends)
        thing = route.carried
        route.carried = None
        route.stamp += 1
        if route.waiting:  # the ports are as busy as before
            follower, seconds = route.waiting.popleft()
            route.carried, route.left_s, route.since_s = follower, seconds, end_s
            heappush(self._ends, (end_s + seconds / route.speed, number, route.stamp, route))
        else:
            self._changed.pop(number, None)
            for port, _ in route.ports:
                others = self._on_port[port]
                del others[number]
                self._changed.update(others)
        return thing, end_s

    def share_out(self, now_s: float) -> None:
        """Divides the ports again that were entered or left at this moment. Nobody asks for an end before that."""
        changed = self._changed
        if not changed:
            return
        while changed:
            _, route = changed.popitem()
            routes = self._neighbours(route)
            for number in routes:
                changed.pop(number, None)
            found = [*routes.values()]
            for each, speed in zip(found, shared_speeds(found), strict=True):
                if speed == each.speed:
                    continue
                each.left_s -= each.speed * (now_s - each.since_s)
                each.since_s, each.speed = now_s, speed
                each.stamp += 1
                heappush(self._ends, (now_s + max(each.left_s, 0.0) / speed, each.number, each.stamp, each))

    def _neighbours(self, route: Route) -> dict[int, Route]:
        """All that share ports with the route, directly or by way of others; itself too."""
        found, seen, left = {route.number: route}, set[int](), [route]
        while left:
            for port, _ in left.pop().ports:
                if port not in seen:
                    seen.add(port)
                    for number, other in self._on_port[port].items():
                        if number not in found:
                            found[number] = other
                            left.append(other)
        return found


def shared_speeds(routes: Sequence[Route]) -> list[float]:
    """The max-min fair speeds of routes that all carry something, each 1 at most."""
    if len(routes) == 1:
        return [routes[0].alone]
    speeds = [0.0] * len(routes)
    room: dict[int, float] = {}
    crowd: dict[int, float] = {}
    for route in routes:
        for port, count in route.ports:
            room[port] = 1.0
            crowd[port] = crowd.get(port, 0.0) + count
    growing = list(range(len(routes)))
    while growing:
        level, full = _next_full(room, crowd, min(routes[index].share for index in growing))
        still = []
        for index in growing:
            route = routes[index]
            if route.share > level * (1 + _ROUNDING) and not any(port in full for port, _ in route.ports):
                still.append(index)
                continue
            speeds[index] = min(level / route.share, 1.0)
            for port, count in route.ports:
                room[port] -= speeds[index] * route.share * count
                crowd[port] -= count
        growing = still
    return speeds


def _next_full(room: Mapping[int, float], crowd: Mapping[int, float], most: float) -> tuple[float, set[int]]:
    """The level up to which all that grow can grow: `most`, or until a port is full; and the ports that are full then.

    `room` is what is left of each port, `crowd` how many of those that grow pass it.
    """
    filled = {port: room[port] / count for port, count in crowd.items() if count > _ROUNDING}
    level = min([most, *filled.values()])
    return level, {port for port, at in filled.items() if at <= level * (1 + _ROUNDING)}
