"""Compile: a program's streams as columns, the form in which the engine (`play`) plays them.

A column has one row for each instruction: its own seconds, and the workers that it waits for. Two workers meet at an
edge (a send and its receive). Several meet at an exchange.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from pipeplan.documents.stage_costs import StageCosts
from pipeplan.errors import ScheduleError
from pipeplan.programs.instructions import (
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
from pipeplan.programs.program import Program, Stream
from pipeplan.programs.text import format_instruction
from pipeplan.simulation.network import Route

_TRANSFER = (SendActivation, RecvActivation, SendGradient, RecvGradient)
_SENDS = (SendActivation, SendGradient)
_GRADIENTS = (SendGradient, RecvGradient)
_COMPLETING = (Backward, BackwardWeight)


class Meet(Enum):
    """How a worker meets others at an instruction."""

    RECEIVE = "waits for a tensor on an edge"
    SEND = "hands a tensor to an edge, and goes on"
    EXCHANGE = "waits for all members of an exchange, and for its end"
    AWAIT = "waits for an exchange that was begun earlier"
    COMPLETE = "completes, with its backward's end, the gradients of an exchange, and goes on"


class Handed(IntEnum):
    """What is handed over, in the order in which ports take it at the same instant."""

    ACTIVATION = 0
    GRADIENT = 1
    EXCHANGE = 2
    PART = 3
    """What an exchange sends between units, after what it does inside them."""


Group = tuple[int, Handed]
"""What is handed over at the same instant goes by stage, then by what it is; equal groups share a port."""

_Meeting = tuple[int, ReduceGradients | ReduceTied | ReduceNorm]
"""What tells exchanges apart: the stage whose replicas take part, or the replica whose stages do; the instruction."""


class _Port(NamedTuple):
    """Outwards or inwards, how many devices share it, and the number of their unit.

    `own`: a device's own link, on its way to the port that so many devices share.
    """

    out: bool
    devices: int
    unit: int
    own: bool = False


@dataclass(slots=True, eq=False)
class Edge:
    """The tensors that one worker sends to another in one direction: first in, first out."""

    number: int
    sender: int
    receiver: int
    group: Group
    seconds: float
    latency_s: float
    route: Route | None
    free_s: float = 0.0
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    taken: int = 0
    awaited: bool = False


@dataclass(slots=True, eq=False)
class ExchangeLine:
    """A stage's exchanges: one is under way on the route, and others wait for its end."""

    route: Route
    busy: bool = False
    waiting: deque["Exchange"] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Exchange:
    """An exchange among replicas or among stages: how many workers are still missing, and when the last one arrived.

    It takes `inside_s` within units of devices, then `seconds` on its line's route, or without one. `tail_s` is what is
    left of an exchange that runs beside a backward once that backward has ended.
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
        """How long it takes where nothing else is on its way."""
        return self.inside_s + self.seconds


@dataclass(frozen=True, slots=True)
class Column:
    """A stream: for every instruction its own seconds, how it meets others (or None), and its edge or exchange."""

    rank: int
    overhead_s: float
    own_s: list[float]
    meets: list[Meet | None]
    edges: list[Edge | None]
    exchanges: dict[int, Exchange]


class Compiler:
    """Streams to columns.

    Every sender, receiver and direction has an edge, on which the k-th tensor sent is the k-th received. Raises
    ScheduleError for an instruction that no worker can play, and where a receive expects another microbatch than is
    sent.
    """

    def __init__(self, program: Program, costs: Sequence[StageCosts], devices: Sequence[Sequence[int]]) -> None:
        self._program = program
        self._costs = costs
        self._devices = devices
        self._edges: dict[tuple[int, int, bool, int], Edge] = {}
        self._exchanges: dict[_Meeting, Exchange] = {}
        self._lines: dict[int, ExchangeLine] = {}
        self._ports: dict[_Port, int] = {}
        self.routes: list[Route] = []
        self.columns = [self._column(stream) for stream in program.streams]
        self._leave_out_ports()
        for edge in self._edges.values():
            for sent, received in zip(edge.sent, edge.received, strict=False):
                if sent != received:
                    raise ScheduleError(
                        f"rank {edge.receiver} waits for microbatch {received} from rank {edge.sender}, "
                        f"which sends {sent} first"
                    )

    @property
    def edges(self) -> Sequence[Edge]:
        """All edges, by number."""
        return tuple(self._edges.values())

    @property
    def exchanges(self) -> Sequence[Exchange]:
        """All exchanges, by number."""
        return tuple(self._exchanges.values())

    @property
    def ports(self) -> int:
        """How many ports there are."""
        return len(self._ports)

    def _column(self, stream: Stream) -> Column:
        """One worker's stream. `met` keeps the edge of a kind, peer and chunk: most streams meet few, many times."""
        pipeline = self._program.pipeline
        stages = [pipeline.stage_of(stream.stage, chunk) for chunk in range(pipeline.chunks)]
        every = [self._costs[stage] for stage in stages]
        # What a backward takes to run blocks again.
        within_s = [own.recompute_s * pipeline.recomputes_by_block(s) for own, s in zip(every, stages, strict=True)]
        tables: list[dict[type[Instruction], float]] = [
            {
                Forward: costs.forward_s + costs.instruction_s,
                Recompute: costs.recompute_s + costs.instruction_s,
                Backward: costs.backward_s + again_s + costs.instruction_s,
                BackwardInput: costs.backward_input_s + costs.instruction_s,
                Update: costs.update_s,
                Checkpoint: 0.0,
            }
            for costs, again_s in zip(every, within_s, strict=True)
        ]
        seconds, several = tables[0], len(tables) > 1
        column = Column(stream.rank, self._costs[stream.stage].instruction_s, [], [], [], {})
        begun: set[int] = set()
        met: dict[tuple[type[Instruction], int, int], tuple[Meet, Edge, list[int]]] = {}
        for index, instruction in enumerate(stream.instructions):
            kind = type(instruction)
            if several:
                seconds = tables[instruction.chunk]
            taken_s = seconds.get(kind)
            meet: Meet | None = None
            edge = None
            if taken_s is None and isinstance(instruction, _TRANSFER):
                key = (kind, instruction.peer, instruction.chunk)
                if key not in met:
                    met[key] = self._met(stream.rank, kind, instruction.peer, stages[instruction.chunk])
                meet, edge, microbatches = met[key]
                taken_s = 0.0
                microbatches.append(instruction.microbatch)
            elif isinstance(instruction, BackwardWeight):
                own = self._costs[stages[instruction.chunk]]
                taken_s = len(instruction.microbatches) * own.backward_weight_s + own.instruction_s
            elif isinstance(instruction, ReduceTied | ReduceNorm):
                taken_s, meet = 0.0, Meet.EXCHANGE
                column.exchanges[index] = self._among_stages(stream, instruction)
            elif isinstance(instruction, StartReduce | ReduceGradients):
                taken_s, meet = 0.0, self._among_replicas(column, stream, index, begun)
            if taken_s is None:
                raise ScheduleError(f"rank {stream.rank} cannot play {format_instruction(instruction)}")
            if index in column.exchanges and kind in _COMPLETING:
                meet = Meet.COMPLETE
            column.own_s.append(taken_s)
            column.meets.append(meet)
            column.edges.append(edge)
        return column

    def _met(self, rank: int, kind: type[Instruction], peer: int, stage: int) -> tuple[Meet, Edge, list[int]]:
        """How a transfer meets, its edge, and where the edge lists its microbatches.

        An edge goes out from its sender's stage: two ranks with several stages each have several edges.
        """
        sends, gradients = issubclass(kind, _SENDS), issubclass(kind, _GRADIENTS)
        if sends:
            sender, receiver = rank, peer
        else:
            sender, receiver, stage = peer, rank, stage + 1 if gradients else stage - 1
        key = (sender, receiver, gradients, stage)
        if key not in self._edges:
            costs = self._costs[stage]
            seconds = costs.gradient_transfer_s if gradients else costs.activation_transfer_s
            behind_a_port = costs.gradient_port_devices if gradients else costs.activation_port_devices
            share = costs.gradient_device_share if gradients else costs.activation_device_share
            passed: list[_Port] = []
            if seconds > 0 and behind_a_port:
                for each in zip(self._devices[sender], self._devices[receiver], strict=True):
                    out, into = (device // behind_a_port for device in each)
                    if out != into:
                        passed += [_Port(True, behind_a_port, out), _Port(False, behind_a_port, into)]
                        if share < 1:
                            passed.append(_Port(True, behind_a_port, each[0], own=True))
                            passed.append(_Port(False, behind_a_port, each[1], own=True))
            self._edges[key] = Edge(
                number=len(self._edges),
                sender=sender,
                receiver=receiver,
                group=(stage, Handed.GRADIENT if gradients else Handed.ACTIVATION),
                seconds=seconds,
                latency_s=costs.latency_s,
                route=self._route(Counter(passed), share, share) if passed else None,
            )
        edge = self._edges[key]
        return (Meet.SEND, edge, edge.sent) if sends else (Meet.RECEIVE, edge, edge.received)

    def _among_stages(self, stream: Stream, instruction: ReduceTied | ReduceNorm) -> Exchange:
        """The exchange in which these stages wait for one another. It is so small that it takes the latency alone.

        A rank takes part once. Nothing is sent where it has all of the stages.
        """
        pipeline = self._program.pipeline
        if isinstance(instruction, ReduceTied):
            replica, members = stream.replica, instruction.stages
            missing = len({pipeline.place_of(stage)[0] for stage in members})
        else:
            replica, members, missing = 0, tuple(range(pipeline.depth)), len(self._program.streams)
        key = (replica, instruction)
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(
                number=len(self._exchanges),
                group=(members[0], Handed.EXCHANGE),
                seconds=max(self._costs[stage].latency_s for stage in members) if missing > 1 else 0.0,
                missing=missing,
                line=None,
            )
        return self._exchanges[key]

    def _among_replicas(self, column: Column, stream: Stream, index: int, begun: set[int]) -> Meet | None:
        """Enters an exchange of a stage's replicas where the worker meets it; returns how, None where it goes on.

        All replicas exchange with each other, or a `source` sends to the others.
        """
        instruction = stream.instructions[index]
        assert isinstance(instruction, StartReduce | ReduceGradients)
        begins, source = isinstance(instruction, StartReduce), instruction.source
        stage = self._program.pipeline.stage_of(stream.stage, instruction.chunk)
        key = (stage, ReduceGradients(instruction.version))
        if key not in self._exchanges:
            costs = self._costs[stage]
            line = self._line(stage) if costs.reduce_s > 0 and (costs.reduce_port_devices or begins) else None
            inside_s = costs.reduce_inside_s if costs.reduce_port_devices else 0.0
            following = (*stream.instructions[index + 1 : index + 2], None)[0]  # completes the gradients
            self._exchanges[key] = Exchange(
                number=len(self._exchanges),
                group=(stage, Handed.EXCHANGE),
                seconds=costs.reduce_s - inside_s,
                missing=1 if begins and source is not None else self._program.pipeline.replicas[stage],
                line=line,
                inside_s=inside_s,
                tail_s=costs.exchange_tail_s(split=isinstance(following, BackwardWeight)),
            )
        exchange = self._exchanges[key]

        if begins:
            begun.add(exchange.number)
            if source in (None, stream.rank):
                column.exchanges[index + 1] = exchange
            return None
        if exchange.number in begun and source == stream.rank:
            return None
        column.exchanges[index] = exchange
        return Meet.AWAIT if exchange.number in begun else Meet.EXCHANGE

    def _line(self, stage: int) -> ExchangeLine:
        """A stage's exchanges, one after another: through ports, or on links of their own.

        A ring enters and leaves every unit once, however many of the replicas are in it. Each of these carries its
        share of it (`costs.collectives`).
        """
        if stage not in self._lines:
            costs = self._costs[stage]
            behind_a_port, share = costs.reduce_port_devices, costs.reduce_device_share
            passed: dict[_Port, float] = {}
            if behind_a_port:
                first_stage, _ = self._program.pipeline.place_of(stage)
                streams = self._program.streams
                devices = [device for s in streams if s.stage == first_stage for device in self._devices[s.rank]]
                inside = Counter(device // behind_a_port for device in devices)
                share = min(share * min(inside.values()), 1.0)
                for out in (True, False):
                    passed |= {_Port(out, behind_a_port, unit): 1.0 for unit in sorted(inside)}
                    if costs.reduce_device_share < 1:
                        own = [_Port(out, behind_a_port, device, own=True) for device in devices]
                        passed |= {port: 1.0 / inside[port.unit // behind_a_port] for port in own}
            self._lines[stage] = ExchangeLine(self._route(passed, share, costs.reduce_device_share))
        return self._lines[stage]

    def _route(self, passed: Mapping[_Port, float], share: float, own: float) -> Route:
        """A route through these ports, of which a device's own link carries the share `own`."""
        ports = [
            (self._ports.setdefault(port, len(self._ports)), count / own if port.own else float(count))
            for port, count in passed.items()
        ]
        self.routes.append(Route(number=len(self.routes), share=share, ports=tuple(ports)))
        return self.routes[-1]

    def _leave_out_ports(self) -> None:
        """Keeps one of several ports that the same routes pass alike, and none that is never full."""
        passing: dict[int, list[tuple[int, float]]] = {port: [] for port in self._ports.values()}
        for route in self.routes:
            for port, count in route.ports:
                passing[port].append((route.number, count))
        kept = {tuple(routes): port for port, routes in reversed(passing.items())}
        full = set(kept.values())
        for routes, port in kept.items():
            if sum(self.routes[number].share * count for number, count in routes) <= 1:
                full.remove(port)
        for route in self.routes:
            route.ports = tuple(each for each in route.ports if each[0] in full)
