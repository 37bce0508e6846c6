"""Engine: when every instruction of a program starts and ends. What `simulate` makes its timeline of.

Streams are compiled to columns: the seconds of what a worker does by itself, and the edge or gradient exchange at which
it meets others. Workers run ahead as far as they can; what goes through a port is served in the order of time once
nobody can run ahead any further: nothing that is handed over later can then have come before.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from planner_service.core.errors import ScheduleError
from planner_service.core.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Checkpoint,
    Forward,
    Instruction,
    Recompute,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    ReduceNorm,
    ReduceTied,
    SendActivation,
    SendGradient,
    StartReduce,
    Update,
)
from planner_service.core.schedule.program import Program, Stream
from planner_service.core.schedule.text import format_instruction
from planner_service.core.stage_costs import StageCosts

_TRANSFER = (SendActivation, RecvActivation, SendGradient, RecvGradient)
_SENDS = (SendActivation, SendGradient)
_GRADIENTS = (SendGradient, RecvGradient)

_RECEIVES, _SENDS_OFF, _EXCHANGES, _AWAITS, _COMPLETES = -1.0, -2.0, -3.0, -4.0, -5.0
"""What stands in the place of an instruction's seconds where the worker meets others: at an exchange that was begun
before it waits, with the backward that completes its gradients it has done its part.
"""

_Meeting = tuple[int, ReduceGradients | ReduceTied | ReduceNorm]
"""An exchange by the stage whose replicas take part, or by the replica whose stages do, and its instruction."""

_Ports = tuple[int, ...]
"""The ports that something occupies: out of its sender's unit, into its receiver's."""


@dataclass(slots=True)
class _Edge:
    """The tensors from one worker to another in one direction: first in, first out."""

    number: int
    sender: int
    receiver: int
    group: int
    seconds: float
    latency_s: float
    ports: _Ports
    free_s: float = 0.0
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    taken: int = 0
    awaited: bool = False


@dataclass(slots=True)
class _Exchange:
    """A gradient exchange, or one among stages: how many are yet to come, and when the last of them is there.

    `tail_s` is what is left of one that goes on during a backward when that has ended.
    """

    number: int
    group: int
    seconds: float
    missing: int
    ports: _Ports
    tail_s: float = 0.0
    waiting: list[int] = field(default_factory=list)
    reached_s: float = 0.0
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Column:
    """A stream: an instruction's own seconds, or a mark and whom it meets.

    `completing_s`: the seconds of the backwards that are marked.
    """

    rank: int
    overhead_s: float
    own_s: list[float]
    edges: list[_Edge | None]
    exchanges: dict[int, _Exchange]
    completing_s: dict[int, float]


class _Compiler:
    """Streams to columns. Every sender, receiver and direction is an edge; the k-th sent is the k-th received."""

    def __init__(self, program: Program, costs: Sequence[StageCosts], devices: Sequence[int]) -> None:
        self._program = program
        self._costs = costs
        self._devices = devices
        self._edges: dict[tuple[int, int, bool, int], _Edge] = {}
        self._exchanges: dict[_Meeting, _Exchange] = {}
        self._ports: dict[tuple[bool, int, int], int] = {}
        self.columns = [self._column(stream) for stream in program.streams]
        for edge in self._edges.values():
            _require_same_order(edge)

    @property
    def edges(self) -> Sequence[_Edge]:
        return tuple(self._edges.values())

    @property
    def exchanges(self) -> Sequence[_Exchange]:
        return tuple(self._exchanges.values())

    @property
    def ports(self) -> int:
        return len(self._ports)

    def _column(self, stream: Stream) -> _Column:
        pipeline = self._program.pipeline
        stages = [pipeline.stage_of(stream.stage, chunk) for chunk in range(pipeline.chunks)]
        costs = self._costs[stream.stage]
        tables = [_seconds(self._costs[stage]) for stage in stages]
        seconds, several = tables[0], len(tables) > 1
        column = _Column(stream.rank, costs.instruction_s, [], [], {}, {})
        begun: set[int] = set()
        met: dict[tuple[type[Instruction], int, int], tuple[float, _Edge, list[int]]] = {}
        for index, instruction in enumerate(stream.instructions):
            kind = type(instruction)
            if several:
                seconds = tables[instruction.chunk]
            taken_s = seconds.get(kind)
            edge = None
            if taken_s is None and isinstance(instruction, _TRANSFER):
                key = (kind, instruction.peer, instruction.chunk)
                if key not in met:
                    met[key] = self._met(stream.rank, kind, instruction.peer, stages[instruction.chunk])
                taken_s, edge, microbatches = met[key]
                microbatches.append(instruction.microbatch)
            elif isinstance(instruction, BackwardWeight):
                own = self._costs[stages[instruction.chunk]]
                taken_s = len(instruction.microbatches) * own.backward_weight_s + own.instruction_s
            elif isinstance(instruction, StartReduce | ReduceGradients | ReduceTied | ReduceNorm):
                taken_s = self._exchanging(column, stream, index, begun)
            if taken_s is None:
                raise ScheduleError(f"rank {stream.rank} cannot play {format_instruction(instruction)}")
            if index in column.exchanges and kind is Backward:
                column.completing_s[index], taken_s = taken_s, _COMPLETES
            column.own_s.append(taken_s)
            column.edges.append(edge)
        return column

    def _exchanging(self, column: _Column, stream: Stream, index: int, begun: set[int]) -> float:
        """Enters an exchange where the worker meets it; returns what stands for the instruction's seconds."""
        instruction = stream.instructions[index]
        if isinstance(instruction, ReduceTied | ReduceNorm):
            column.exchanges[index] = self._among_stages(stream, instruction)
            return _EXCHANGES
        assert isinstance(instruction, StartReduce | ReduceGradients)
        exchange = self._exchange(stream, instruction)
        if isinstance(instruction, ReduceGradients):
            if exchange.number in begun and instruction.source == stream.rank:
                return 0.0
            column.exchanges[index] = exchange
            return _AWAITS if exchange.number in begun else _EXCHANGES
        begun.add(exchange.number)
        if instruction.source in (None, stream.rank):
            column.exchanges[index + 1] = exchange
        return 0.0

    def _met(self, rank: int, kind: type[Instruction], peer: int, stage: int) -> tuple[float, _Edge, list[int]]:
        """How an instruction of this kind is marked, its edge, and where the edge lists its microbatches."""
        if issubclass(kind, _SENDS):
            edge = self._edge(rank, peer, issubclass(kind, _GRADIENTS), stage)
            return _SENDS_OFF, edge, edge.sent
        gradients = issubclass(kind, _GRADIENTS)
        edge = self._edge(peer, rank, gradients, stage + 1 if gradients else stage - 1)
        return _RECEIVES, edge, edge.received

    def _edge(self, sender: int, receiver: int, gradient: bool, stage: int) -> _Edge:
        """From the sender's stage on: two ranks with several stages each have several edges."""
        key = (sender, receiver, gradient, stage)
        if key not in self._edges:
            costs = self._costs[stage]
            seconds = costs.gradient_transfer_s if gradient else costs.activation_transfer_s
            behind_a_port = costs.gradient_port_devices if gradient else costs.activation_port_devices
            self._edges[key] = _Edge(
                number=len(self._edges),
                sender=sender,
                receiver=receiver,
                group=_group(stage, 1 if gradient else 0),
                seconds=seconds,
                latency_s=costs.latency_s,
                ports=self._crossed(sender, receiver, behind_a_port) if seconds > 0 else (),
            )
        return self._edges[key]

    def _exchange(self, stream: Stream, instruction: StartReduce | ReduceGradients) -> _Exchange:
        """Of all replicas, or from one to the others. One that goes on beside other work has its link to itself: where
        there is no port, the ring passes one after another.
        """
        stage, version = self._program.pipeline.stage_of(stream.stage, instruction.chunk), instruction.version
        key = (stage, ReduceGradients(version))
        if key not in self._exchanges:
            costs = self._costs[stage]
            ports = self._ring(stage, costs.reduce_port_devices) if costs.reduce_s > 0 else ()
            begins = isinstance(instruction, StartReduce)
            self._exchanges[key] = _Exchange(
                number=len(self._exchanges),
                group=_group(stage, 2),
                seconds=costs.reduce_s,
                missing=1 if begins and instruction.source is not None else self._program.pipeline.replicas[stage],
                ports=ports or ((self._port(True, 0, stage),) if begins and costs.reduce_s > 0 else ()),
                tail_s=costs.reduce_s if costs.reduce_tail_s is None else costs.reduce_tail_s,
            )
        return self._exchanges[key]

    def _among_stages(self, stream: Stream, instruction: ReduceTied | ReduceNorm) -> _Exchange:
        """Whoever takes part waits for the others; what is exchanged takes as long as its way, the latency."""
        replicas = self._program.pipeline.replicas
        if isinstance(instruction, ReduceTied):
            replica, members, missing = stream.replica, instruction.stages, len(instruction.stages)
        else:
            replica, members, missing = 0, tuple(range(len(replicas))), sum(replicas)
        key = (replica, instruction)
        if key not in self._exchanges:
            self._exchanges[key] = _Exchange(
                number=len(self._exchanges),
                group=_group(members[0], 2),
                seconds=max(self._costs[stage].latency_s for stage in members),
                missing=missing,
                ports=(),
            )
        return self._exchanges[key]

    def _crossed(self, sender: int, receiver: int, behind_a_port: int) -> _Ports:
        """Out of one unit and into the other; none between neighbours in a unit."""
        if behind_a_port == 0:
            return ()
        units = [self._devices[rank] // behind_a_port for rank in (sender, receiver)]
        if units[0] == units[1]:
            return ()
        return (self._port(True, behind_a_port, units[0]), self._port(False, behind_a_port, units[1]))

    def _ring(self, stage: int, behind_a_port: int) -> _Ports:
        """A ring enters and leaves every unit once, however many of the replicas are in it."""
        if behind_a_port == 0:
            return ()
        first_stage = stage % self._program.pipeline.span
        ranks = [stream.rank for stream in self._program.streams if stream.stage == first_stage]
        units = sorted({self._devices[rank] // behind_a_port for rank in ranks})
        return tuple(self._port(out, behind_a_port, unit) for unit in units for out in (True, False))

    def _port(self, out: bool, behind_a_port: int, unit: int) -> int:
        return self._ports.setdefault((out, behind_a_port, unit), len(self._ports))


def _group(stage: int, kind: int) -> int:
    """What is handed over at once is served by stage, and there activations first, then gradients, then exchanges."""
    return 3 * stage + kind


def _seconds(costs: StageCosts) -> dict[type[Instruction], float]:
    """What a worker does by itself, and for how long."""
    return {
        Forward: costs.forward_s + costs.instruction_s,
        Recompute: costs.recompute_s + costs.instruction_s,
        Backward: costs.backward_s + costs.instruction_s,
        BackwardInput: costs.backward_input_s + costs.instruction_s,
        Update: costs.update_s,
        Checkpoint: 0.0,
    }


def _require_same_order(edge: _Edge) -> None:
    for sent, received in zip(edge.sent, edge.received, strict=False):
        if sent != received:
            raise ScheduleError(
                f"rank {edge.receiver} waits for microbatch {received} from rank {edge.sender}, "
                f"which sends {sent} first"
            )


class Engine:
    """Plays a program. `start_s` and `end_s` have a list a rank, an entry an instruction."""

    def __init__(self, program: Program, costs: Sequence[StageCosts], devices: Sequence[int]) -> None:
        compiled = _Compiler(program, costs, devices)
        ranks = range(len(program.streams))
        self._program = program
        self._columns = compiled.columns
        self._edges = compiled.edges
        self._exchanges = compiled.exchanges
        self._port_free_s = [0.0] * compiled.ports
        self._requests: list[tuple[float, int, int]] = []
        self._ready = deque(ranks)
        self.start_s: list[list[float]] = [[] for _ in ranks]
        self.end_s: list[list[float]] = [[] for _ in ranks]

    def play(self) -> None:
        """To the end. Raises ScheduleError where some worker cannot get there."""
        while True:
            while self._ready:
                self._advance(self._ready.popleft())
            if not self._requests:
                break
            self._serve_next()
        self._require_done()

    def _advance(self, rank: int) -> None:
        """One worker as far as it can go."""
        column, starts, ends = self._columns[rank], self.start_s[rank], self.end_s[rank]
        own_s, edges = column.own_s, column.edges
        now_s = ends[-1] if ends else 0.0
        for index in range(len(ends), len(own_s)):
            seconds = own_s[index]
            if seconds >= 0.0:
                end_s = now_s + seconds
            else:
                edge = edges[index]
                met_s = self._exchange(column, index, now_s) if edge is None else self._meet(column, index, edge, now_s)
                if met_s is None:
                    break
                end_s = met_s
            starts.append(now_s)
            ends.append(end_s)
            now_s = end_s

    def _meet(self, column: _Column, index: int, edge: _Edge, now_s: float) -> float | None:
        """When a send or a receive is over; None if the tensor is yet to be sent: its arrival wakes the worker."""
        if column.own_s[index] == _SENDS_OFF:
            now_s += column.overhead_s
            if edge.ports:
                heappush(self._requests, (now_s, edge.group, edge.number))
            else:
                edge.free_s = (edge.free_s if edge.free_s > now_s else now_s) + edge.seconds
                self._arrive(edge, edge.free_s + edge.latency_s)
            return now_s
        if edge.taken == len(edge.arrival_s):
            edge.awaited = True
            return None
        arrival_s = edge.arrival_s[edge.taken]
        edge.taken += 1
        return (arrival_s if arrival_s > now_s else now_s) + column.overhead_s

    def _arrive(self, edge: _Edge, arrival_s: float) -> None:
        edge.arrival_s.append(arrival_s)
        if edge.awaited:
            edge.awaited = False
            self._ready.append(edge.receiver)

    def _exchange(self, column: _Column, index: int, now_s: float) -> float | None:
        """When the exchange is over; None while some replica is missing, or it waits for its ports."""
        exchange, mark = column.exchanges[index], column.own_s[index]
        if mark == _COMPLETES:
            return self._complete(exchange, now_s, now_s + column.completing_s[index])
        if exchange.end_s is not None:
            return exchange.end_s if exchange.end_s > now_s else now_s
        if mark == _AWAITS:
            exchange.waiting.append(column.rank)
            return None
        exchange.missing -= 1
        exchange.reached_s = max(exchange.reached_s, now_s)
        if exchange.missing or exchange.ports:
            exchange.waiting.append(column.rank)
            if not exchange.missing:
                heappush(self._requests, (exchange.reached_s, exchange.group, exchange.number))
            return None
        return self._exchanged(exchange, exchange.reached_s + exchange.seconds)

    def _complete(self, exchange: _Exchange, start_s: float, end_s: float) -> float:
        """A backward has ended that completes a worker's gradients: the exchange began in it, so that its tail is left.

        Its link is taken in one piece, that ends when the pieces would that wait for one gradient after the other.
        """
        exchange.missing -= 1
        exchange.reached_s = max(exchange.reached_s, start_s, end_s + exchange.tail_s - exchange.seconds)
        if not exchange.missing:
            if exchange.ports:
                heappush(self._requests, (exchange.reached_s, exchange.group, exchange.number))
            else:
                self._exchanged(exchange, exchange.reached_s + exchange.seconds)
        return end_s

    def _exchanged(self, exchange: _Exchange, end_s: float) -> float:
        exchange.end_s = end_s
        self._ready.extend(exchange.waiting)
        return end_s

    def _serve_next(self) -> None:
        """The earliest request; what replicas hand over at the same instant shares ports and ends together."""
        requests = self._requests
        now_s, group, number = heappop(requests)
        if group % 3 == 2:
            exchange = self._exchanges[number]
            self._exchanged(exchange, self._occupied_until(exchange.ports, now_s, exchange.seconds))
            return
        edges = [self._edges[number]]
        while requests and requests[0][0] == now_s and requests[0][1] == group:
            edges.append(self._edges[heappop(requests)[2]])
        if len(edges) == 1:
            edge = edges[0]
            self._arrive(edge, self._occupied_until(edge.ports, now_s, edge.seconds) + edge.latency_s)
        else:
            self._serve_together(edges, now_s)

    def _serve_together(self, edges: Sequence[_Edge], now_s: float) -> None:
        seconds: dict[int, float] = defaultdict(float)
        for edge in edges:
            for port in edge.ports:
                seconds[port] += edge.seconds
        for port, taken_s in seconds.items():
            self._occupied_until((port,), now_s, taken_s)
        for edge in edges:
            self._arrive(edge, max(self._port_free_s[port] for port in edge.ports) + edge.latency_s)

    def _occupied_until(self, ports: _Ports, now_s: float, seconds: float) -> float:
        """Each port is taken from when it is free; returns when the last of them is through."""
        free_s = self._port_free_s
        last_s = now_s
        for port in ports:
            end_s = free_s[port] = (free_s[port] if free_s[port] > now_s else now_s) + seconds
            if end_s > last_s:
                last_s = end_s
        return last_s

    def _require_done(self) -> None:
        blocked = [c.rank for c in self._columns if len(self.end_s[c.rank]) < len(c.own_s)]
        if blocked:
            waits = "; ".join(f"rank {rank} waits at {self._at(rank)}" for rank in blocked[:4])
            raise ScheduleError(f"deadlock: {waits}")
        for edge in self._edges:
            if len(edge.sent) > len(edge.received):
                raise ScheduleError(
                    f"rank {edge.sender} sends microbatch {edge.sent[len(edge.received)]} to rank {edge.receiver}, "
                    "which never receives it"
                )

    def _at(self, rank: int) -> str:
        return format_instruction(self._program.streams[rank].instructions[len(self.end_s[rank])])
