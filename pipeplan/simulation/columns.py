"""Columns: a program's streams as input of the engine (`play`).

A column has one step for each instruction: its own seconds, and the workers that it waits for. Two workers meet at an
edge (a send and its receive). Several meet at an exchange.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TypeAlias

from pipeplan.simulation.network import Route


class Meet(Enum):
    """The kinds of meetings of a worker with several others at an instruction."""

    EXCHANGE = "waits for all members of an exchange, and for its end"
    AWAIT = "waits for an exchange that was begun earlier"
    COMPLETE = "completes, with its backward's end, the gradients of an exchange, and goes on"


class Handed(IntEnum):
    """The kinds of transfers, in the order in which ports take them at the same instant."""

    ACTIVATION = 0
    GRADIENT = 1
    EXCHANGE = 2
    PART = 3
    """The transfer of an exchange between units, after its part inside them."""


_FEW_AROUND = 8
"""A port with more routes than this is seldom free."""

Group = tuple[int, Handed]
"""Transfers at the same instant are ordered by stage, then by kind; equal groups share a port."""


@dataclass(slots=True, eq=False)
class Edge:
    """The tensors that one worker sends to another in one direction: first in, first out.

    Each takes `seconds` at full speed, and `alone_s` if it has the ports of its route to itself. It keeps the sender
    busy for `sends_s`, 0 where a stream lists its sends, which are steps then, and the receiver for `receives_s`.
    `around` is the set of routes through these ports, its own among them. `beside` has the `asked_s` of their edges if
    this edge is brief: a worker that waits when a tensor starts sends another one only after this tensor has arrived.
    If the edge is `watched` for brief ones, `asked_s` lists the start times of the tensors that are yet to start.
    """

    number: int
    sender: int
    receiver: int
    group: Group
    seconds: float
    latency_s: float
    route: Route | None
    sends_s: float
    receives_s: float
    alone_s: float = 0.0
    around: int = 0
    beside: tuple[deque[float], ...] = ()
    watched: bool = False
    asked_s: deque[float] = field(default_factory=deque)
    free_s: float = 0.0
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    arrival_s: deque[float] = field(default_factory=deque)
    awaited: bool = False

    def look_around(self, routed: Mapping[int, "Edge"], least_s: Sequence[float]) -> None:
        """Determines the sharing of its ports: never, or only with tensors that are sent after it has arrived.

        `routed` are the edges by the numbers of their routes; `least_s` is, by rank, the least compute of a step that
        sends.
        """
        assert self.route is not None
        self.alone_s, self.around = self.seconds / self.route.alone, self.route.near | self.route.bit
        if not self.route.near:  # a link of its own
            self.seconds, self.route = self.alone_s, None
        elif self.around.bit_count() <= _FEW_AROUND:
            numbers = [number for number in range(self.around.bit_length()) if self.around >> number & 1]
            beside = [routed[number] for number in numbers if number in routed]  # no exchanges
            if len(beside) == len(numbers) and all(self.alone_s <= least_s[edge.sender] for edge in beside):
                self.beside = tuple(edge.asked_s for edge in beside)
                for edge in beside:
                    edge.watched = True

    def passes_alone(self, busy: int, now_s: float, ready: deque[int]) -> bool:
        """Delivers a tensor that starts now, if its ports carry no other until it has arrived.

        All workers wait or are `ready` to continue; `busy` is the set of routes that carry a transfer.
        """
        self.asked_s.popleft()
        if not self.beside or busy & self.around:
            return False
        end_s = now_s + self.alone_s
        for asked_s in self.beside:
            if asked_s and asked_s[0] < end_s:
                return False
        self.arrival_s.append(end_s + self.latency_s)
        if self.awaited:
            self.awaited = False
            ready.append(self.receiver)
        return True


@dataclass(slots=True, eq=False)
class ExchangeLine:
    """A stage's exchanges: one is in transit on the route, and others wait for its end."""

    route: Route
    busy: bool = False
    waiting: deque["Exchange"] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Exchange:
    """An exchange among replicas or among stages: the number of missing workers, and when the last one arrived.

    It takes `inside_s` within units of devices, then `seconds` on its line's route, or without one. `tail_s` is the
    rest of an exchange that overlaps a backward, once that backward has ended.
    """

    number: int
    group: Group
    seconds: float
    missing: int
    line: ExchangeLine | None
    inside_s: float = 0.0
    tail_s: float = 0.0
    waiting: list[int] = field(default_factory=list)
    reached_s: float = 0.0
    end_s: float | None = None

    @property
    def alone_s(self) -> float:
        """Seconds of the exchange without other traffic."""
        return self.inside_s + self.seconds


Step: TypeAlias = tuple[Edge | None, float, Meet | None, Edge | None]
"""A worker's unit of work: receives from an edge, computes for some seconds, in which it may meet the members of an
exchange, and sends on an edge. Many instructions share a step.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A stream: its steps, one for each instruction, and the exchanges by the numbers of the steps that meet at them.

    A step that includes a transfer includes its overhead (`Edge`): that of a receive before its compute, that of a
    send after it. If transfers are implied, `kinds` are those of the instructions (`instructions.numbered`). A step
    that sends computes for at least `least_s`.
    """

    rank: int
    steps: list[Step]
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    kinds: bytes = b""
    least_s: float = 0.0
