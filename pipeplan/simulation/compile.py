"""Columns: streams as the engine plays them. A row has an instruction's own seconds, or whom the worker meets there."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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

_TRANSFER = (SendActivation, RecvActivation, SendGradient, RecvGradient)
_SENDS = (SendActivation, SendGradient)
_GRADIENTS = (SendGradient, RecvGradient)
_COMPLETING = (Backward, BackwardWeight)

RECEIVES, SENDS_OFF, EXCHANGES, AWAITS, COMPLETES = -1.0, -2.0, -3.0, -4.0, -5.0
"""What stands in the place of an instruction's seconds where the worker meets others: at an exchange that was begun
before it waits, with the backward that completes its gradients it has done its part.
"""

_Meeting = tuple[int, ReduceGradients | ReduceTied | ReduceNorm]
"""An exchange by the stage whose replicas take part, or by the replica whose stages do, and its instruction."""

Ports = tuple[int, ...]
"""The ports that something occupies: out of its sender's unit, into its receiver's."""


@dataclass(slots=True)
class Edge:
    """The tensors from one worker to another in one direction: first in, first out."""

    number: int
    sender: int
    receiver: int
    group: int
    seconds: float
    latency_s: float
    ports: Ports
    free_s: float = 0.0
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    taken: int = 0
    awaited: bool = False


@dataclass(slots=True)
class Exchange:
    """A gradient exchange, or one among stages: how many are yet to come, and when the last of them is there.

    `tail_s` is what is left of one that goes on during a backward when that has ended.
    """

    number: int
    group: int
    seconds: float
    missing: int
    ports: Ports
    tail_s: float = 0.0
    waiting: list[int] = field(default_factory=list)
    reached_s: float = 0.0
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A stream: an instruction's own seconds, or a mark and whom it meets.

    `completing_s`: the seconds of the backwards that are marked.
    """

    rank: int
    overhead_s: float
    own_s: list[float]
    edges: list[Edge | None]
    exchanges: dict[int, Exchange]
    completing_s: dict[int, float]


class Compiler:
    """Streams to columns. Every sender, receiver and direction is an edge; the k-th sent is the k-th received."""

    def __init__(self, program: Program, costs: Sequence[StageCosts], devices: Sequence[int]) -> None:
        self._program = program
        self._costs = costs
        self._devices = devices
        self._edges: dict[tuple[int, int, bool, int], Edge] = {}
        self._exchanges: dict[_Meeting, Exchange] = {}
        self._ports: dict[tuple[bool, int, int], int] = {}
        self.columns = [self._column(stream) for stream in program.streams]
        for edge in self._edges.values():
            _require_same_order(edge)

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
        """How many there are."""
        return len(self._ports)

    def _column(self, stream: Stream) -> Column:
        pipeline = self._program.pipeline
        stages = [pipeline.stage_of(stream.stage, chunk) for chunk in range(pipeline.chunks)]
        costs = self._costs[stream.stage]
        tables = [_seconds(self._costs[stage]) for stage in stages]
        seconds, several = tables[0], len(tables) > 1
        column = Column(stream.rank, costs.instruction_s, [], [], {}, {})
        begun: set[int] = set()
        met: dict[tuple[type[Instruction], int, int], tuple[float, Edge, list[int]]] = {}
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
            if index in column.exchanges and kind in _COMPLETING:
                column.completing_s[index], taken_s = taken_s, COMPLETES
            column.own_s.append(taken_s)
            column.edges.append(edge)
        return column

    def _exchanging(self, column: Column, stream: Stream, index: int, begun: set[int]) -> float:
        """Enters an exchange where the worker meets it; returns what stands for the instruction's seconds."""
        instruction = stream.instructions[index]
        if isinstance(instruction, ReduceTied | ReduceNorm):
            column.exchanges[index] = self._among_stages(stream, instruction)
            return EXCHANGES
        assert isinstance(instruction, StartReduce | ReduceGradients)
        split = isinstance((*stream.instructions[index + 1 : index + 2], None)[0], BackwardWeight)
        exchange = self._exchange(stream, instruction, split=split)
        if isinstance(instruction, ReduceGradients):
            if exchange.number in begun and instruction.source == stream.rank:
                return 0.0
            column.exchanges[index] = exchange
            return AWAITS if exchange.number in begun else EXCHANGES
        begun.add(exchange.number)
        if instruction.source in (None, stream.rank):
            column.exchanges[index + 1] = exchange
        return 0.0

    def _met(self, rank: int, kind: type[Instruction], peer: int, stage: int) -> tuple[float, Edge, list[int]]:
        """How an instruction of this kind is marked, its edge, and where the edge lists its microbatches."""
        if issubclass(kind, _SENDS):
            edge = self._edge(rank, peer, issubclass(kind, _GRADIENTS), stage)
            return SENDS_OFF, edge, edge.sent
        gradients = issubclass(kind, _GRADIENTS)
        edge = self._edge(peer, rank, gradients, stage + 1 if gradients else stage - 1)
        return RECEIVES, edge, edge.received

    def _edge(self, sender: int, receiver: int, gradient: bool, stage: int) -> Edge:
        """From the sender's stage on: two ranks with several stages each have several edges."""
        key = (sender, receiver, gradient, stage)
        if key not in self._edges:
            costs = self._costs[stage]
            seconds = costs.gradient_transfer_s if gradient else costs.activation_transfer_s
            behind_a_port = costs.gradient_port_devices if gradient else costs.activation_port_devices
            self._edges[key] = Edge(
                number=len(self._edges),
                sender=sender,
                receiver=receiver,
                group=_group(stage, 1 if gradient else 0),
                seconds=seconds,
                latency_s=costs.latency_s,
                ports=self._crossed(sender, receiver, behind_a_port) if seconds > 0 else (),
            )
        return self._edges[key]

    def _exchange(self, stream: Stream, instruction: StartReduce | ReduceGradients, *, split: bool) -> Exchange:
        """Of all replicas, or from one to the others. One that goes on beside other work has its link to itself: where
        there is no port, the ring passes one after another. `split` says that a p2 completes its gradients.
        """
        stage, version = self._program.pipeline.stage_of(stream.stage, instruction.chunk), instruction.version
        key = (stage, ReduceGradients(version))
        if key not in self._exchanges:
            costs = self._costs[stage]
            ports = self._ring(stage, costs.reduce_port_devices) if costs.reduce_s > 0 else ()
            begins = isinstance(instruction, StartReduce)
            self._exchanges[key] = Exchange(
                number=len(self._exchanges),
                group=_group(stage, 2),
                seconds=costs.reduce_s,
                missing=1 if begins and instruction.source is not None else self._program.pipeline.replicas[stage],
                ports=ports or ((self._port(True, 0, stage),) if begins and costs.reduce_s > 0 else ()),
                tail_s=costs.exchange_tail_s(split=split),
            )
        return self._exchanges[key]

    def _among_stages(self, stream: Stream, instruction: ReduceTied | ReduceNorm) -> Exchange:
        """Whoever takes part waits for the others; what is exchanged takes as long as its way, the latency."""
        replicas = self._program.pipeline.replicas
        if isinstance(instruction, ReduceTied):
            replica, members, missing = stream.replica, instruction.stages, len(instruction.stages)
        else:
            replica, members, missing = 0, tuple(range(len(replicas))), sum(replicas)
        key = (replica, instruction)
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(
                number=len(self._exchanges),
                group=_group(members[0], 2),
                seconds=max(self._costs[stage].latency_s for stage in members),
                missing=missing,
                ports=(),
            )
        return self._exchanges[key]

    def _crossed(self, sender: int, receiver: int, behind_a_port: int) -> Ports:
        """Out of one unit and into the other; none between neighbours in a unit."""
        if behind_a_port == 0:
            return ()
        units = [self._devices[rank] // behind_a_port for rank in (sender, receiver)]
        if units[0] == units[1]:
            return ()
        return (self._port(True, behind_a_port, units[0]), self._port(False, behind_a_port, units[1]))

    def _ring(self, stage: int, behind_a_port: int) -> Ports:
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


def _require_same_order(edge: Edge) -> None:
    for sent, received in zip(edge.sent, edge.received, strict=False):
        if sent != received:
            raise ScheduleError(
                f"rank {edge.receiver} waits for microbatch {received} from rank {edge.sender}, "
                f"which sends {sent} first"
            )
