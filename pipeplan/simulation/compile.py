"""Compile: a program's streams as columns, the input of the engine (`play`).

Streams may list their transfers, or leave them `implied` by their compute (`programs.communicate`): the columns are the
same, and take a third of the time to make.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from math import inf, lcm
from operator import attrgetter

from pipeplan.documents.plan import Worker
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.errors import ScheduleError
from pipeplan.programs.communicate import with_transfers
from pipeplan.programs.instructions import (
    NUMBERS,
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
    Transfer,
    Update,
    marking,
    microbatches_of,
    numbered,
)
from pipeplan.programs.program import Program, Stream
from pipeplan.programs.text import format_instruction
from pipeplan.simulation.columns import Column, Edge, Exchange, ExchangeLine, Handed, Meet, Step
from pipeplan.simulation.network import Route
from pipeplan.simulation.ports import Way, shared_ports

_TRANSFER = (SendActivation, RecvActivation, SendGradient, RecvGradient)
_SENDS = (SendActivation, SendGradient)
_GRADIENTS = (SendGradient, RecvGradient)
_COMPLETING = (Backward, BackwardWeight)
_AMONG_REPLICAS = marking({StartReduce, ReduceGradients})
_AMONG_STAGES = marking({ReduceTied, ReduceNorm})
_PASSING = (Forward, Backward, BackwardInput)

_Meeting = tuple[int, int | ReduceTied | ReduceNorm]
"""The identity of an exchange: the stage whose replicas take part, and the version that they make; or the replica whose
stages take part, and the instruction.
"""


class Compiler:
    """Streams to columns.

    Every sender, receiver and direction has an edge, on which the k-th tensor sent is the k-th received. Raises
    ScheduleError for an instruction that no worker can play, and if a receive expects another microbatch than the one
    sent.
    """

    def __init__(
        self, program: Program, costs: Sequence[StageCosts], devices: Sequence[Sequence[int]], *, implied: bool = False
    ) -> None:
        self._program = program
        self._costs = costs
        self._devices = [tuple(each) for each in devices]
        self._implied_transfers = implied
        self._edges: dict[tuple[int, int, bool, int], Edge] = {}
        self._exchanges: dict[_Meeting, Exchange] = {}
        self._lines: dict[int, ExchangeLine] = {}
        self._ways: list[Way] = []
        self._ranks = {Worker(stage=s.stage, replica=s.replica): s.rank for s in program.streams}
        self.routes: list[Route] = []
        column = self._implied if implied else self._column
        self.columns = [column(stream) for stream in program.streams]
        routed, self.ports = shared_ports(tuple(self._ways))
        for route, passed in zip(self.routes, routed, strict=True):
            route.share, route.ports = passed.share, passed.ports
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

    def _column(self, stream: Stream) -> Column:
        """One worker's stream. `met` keeps the step of a kind, peer and chunk: most streams meet few, many times."""
        tables, steps = self._seconds(stream), list[Step]()
        stages, column = self._stages(stream), Column(rank=stream.rank, steps=steps)
        seconds, several = tables[0], len(tables) > 1
        begun: set[int] = set()
        met: dict[tuple[type[Instruction], int, int], tuple[Step, list[int]]] = {}
        for index, instruction in enumerate(stream.instructions):
            kind = type(instruction)
            if several:
                seconds = tables[instruction.chunk]
            taken_s = seconds.get(kind)
            meet: Meet | None = None
            if taken_s is None and isinstance(instruction, _TRANSFER):
                key = (kind, instruction.peer, instruction.chunk)
                if key not in met:
                    met[key] = self._transferred(stream, instruction)
                step, microbatches = met[key]
                microbatches.append(instruction.microbatch)
                steps.append(step)
                continue
            if isinstance(instruction, BackwardWeight):
                taken_s = self._weights_s(stages, instruction)
            elif isinstance(instruction, ReduceTied | ReduceNorm):
                taken_s, meet = 0.0, Meet.EXCHANGE
                column.exchanges[index] = self._among_stages(stream, instruction)
            elif isinstance(instruction, StartReduce | ReduceGradients):
                taken_s, meet = 0.0, self._among_replicas(column.exchanges, stream, index, begun)
            if taken_s is None:
                raise ScheduleError(f"rank {stream.rank} cannot play {format_instruction(instruction)}")
            if index in column.exchanges and kind in _COMPLETING:
                meet = Meet.COMPLETE
            steps.append((None, taken_s, meet, None))
        return column

    def _transferred(self, stream: Stream, transfer: Transfer) -> tuple[Step, list[int]]:
        """The step of a transfer that a stream lists, and its edge's list of microbatches."""
        edge = self._edge(stream, transfer)
        if isinstance(transfer, _SENDS):
            own = self._costs[self._stages(stream)[transfer.chunk]]
            return (None, own.handing_over_s(onward=isinstance(transfer, SendActivation)), None, edge), edge.sent
        return (edge, 0.0, None, None), edge.received

    def _implied(self, stream: Stream) -> Column:
        """One worker's stream without its transfers: an instruction's step includes the transfers around it.

        Instructions of one kind, chunk and peer have equal steps, but for those that exchange.
        """
        instructions, kinds = stream.instructions, numbered(stream.instructions)
        keys = self._alike(stream, kinds)
        of_kinds = list(dict.fromkeys(keys))
        every = self._steps(stream, [instructions[keys.index(key)] for key in of_kinds])
        steps = list(map(dict(zip(of_kinds, every, strict=True)).__getitem__, keys))
        column, begun = Column(rank=stream.rank, steps=steps, kinds=kinds), set[int]()
        column = replace(column, least_s=min((own_s for _, own_s, _, sends in every if sends), default=inf))
        for index in compress(range(len(kinds)), kinds.translate(_AMONG_REPLICAS)):
            meet = self._among_replicas(column.exchanges, stream, index, begun)
            steps[index] = (None, 0.0, meet, None)
        for index in compress(range(len(kinds)), kinds.translate(_AMONG_STAGES)):
            meeting = instructions[index]
            assert isinstance(meeting, ReduceTied | ReduceNorm)
            column.exchanges[index] = self._among_stages(stream, meeting)
            steps[index] = (None, 0.0, Meet.EXCHANGE, None)
        for index in column.exchanges:
            if isinstance(instructions[index], _COMPLETING):
                receives, own_s, _, sends = steps[index]
                steps[index] = (receives, own_s, Meet.COMPLETE, sends)
        return column

    def _alike(self, stream: Stream, kinds: bytes) -> Sequence[object]:
        """For each instruction, a key that it shares with those of equal steps."""
        instructions, replicas = stream.instructions, self._program.pipeline.replicas
        turns = lcm(*replicas[max(stream.stage - 1, 0) : stream.stage + 2])
        if turns == 1 and NUMBERS[BackwardWeight] not in kinds:
            several = self._program.pipeline.chunks > 1
            return list(zip(kinds, map(attrgetter("chunk"), instructions), strict=True)) if several else kinds
        return [
            (kind, each.chunk, each.microbatch % turns if isinstance(each, _PASSING) else len(microbatches_of(each)))
            for kind, each in zip(kinds, instructions, strict=True)
        ]

    def _steps(self, stream: Stream, instructions: Sequence[Instruction]) -> list[Step]:
        """The instructions' steps, with their transfers but without exchanges."""
        found, receives, tables = list[Step](), None, self._seconds(stream)
        worker = Worker(stage=stream.stage, replica=stream.replica)
        for each in with_transfers(instructions, self._program.pipeline, worker, self._ranks):
            if isinstance(each, _SENDS):
                found[-1] = (*found[-1][:3], self._edge(stream, each))
            elif isinstance(each, _TRANSFER):
                receives = self._edge(stream, each)
            else:
                own_s = 0.0
                if isinstance(each, BackwardWeight):
                    own_s = self._weights_s(self._stages(stream), each)
                elif not isinstance(each, StartReduce | ReduceGradients | ReduceTied | ReduceNorm):
                    own_s = tables[each.chunk][type(each)]
                found.append((receives, own_s, None, None))
                receives = None
        return found

    def _weights_s(self, stages: Sequence[int], instruction: BackwardWeight) -> float:
        own = self._costs[stages[instruction.chunk]]
        return len(instruction.microbatches) * own.backward_weight_s + own.instruction_s

    def _stages(self, stream: Stream) -> list[int]:
        pipeline = self._program.pipeline
        return [pipeline.stage_of(stream.stage, chunk) for chunk in range(pipeline.chunks)]

    def _seconds(self, stream: Stream) -> list[dict[type[Instruction], float]]:
        """The seconds of the kinds of instructions that do not wait, by chunk."""
        pipeline = self._program.pipeline
        stages = self._stages(stream)
        every = [self._costs[stage] for stage in stages]
        # The seconds in which a backward recomputes blocks.
        within_s = [own.recompute_s * pipeline.recomputes_by_block(s) for own, s in zip(every, stages, strict=True)]
        return [
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

    def _edge(self, stream: Stream, transfer: Transfer) -> Edge:
        """The edge of a transfer.

        It goes out from its sender's stage: two ranks with several stages each have several edges.
        """
        gradients, stage = isinstance(transfer, _GRADIENTS), self._stages(stream)[transfer.chunk]
        if isinstance(transfer, _SENDS):
            sender, receiver = stream.rank, transfer.peer
        else:
            sender, receiver, stage = transfer.peer, stream.rank, stage + 1 if gradients else stage - 1
        key = (sender, receiver, gradients, stage)
        if key not in self._edges:
            costs, receives = self._costs[stage], self._costs[stage - 1 if gradients else stage + 1]
            seconds = costs.gradient_transfer_s if gradients else costs.activation_transfer_s
            behind_a_port = costs.gradient_port_devices if gradients else costs.activation_port_devices
            share = costs.gradient_device_share if gradients else costs.activation_device_share
            way = Way(self._devices[sender], self._devices[receiver], behind_a_port, share)
            self._edges[key] = Edge(
                number=len(self._edges),
                sender=sender,
                receiver=receiver,
                group=(stage, Handed.GRADIENT if gradients else Handed.ACTIVATION),
                seconds=seconds,
                latency_s=costs.arrives_after_s(onward=not gradients),
                route=self._route(way) if seconds > 0 and behind_a_port and way.crosses else None,
                sends_s=costs.handing_over_s(onward=not gradients) if self._implied_transfers else 0.0,
                receives_s=receives.handing_over_s(onward=gradients),
            )
        return self._edges[key]

    def _among_stages(self, stream: Stream, instruction: ReduceTied | ReduceNorm) -> Exchange:
        """The exchange in which these stages wait for one another. That of the norm takes only the latency, and so does
        that of shared weights whose size is not known.

        A rank takes part once. Nothing is sent if it has all of the stages.
        """
        pipeline = self._program.pipeline
        if isinstance(instruction, ReduceTied):
            replica, members = stream.replica, instruction.stages
            missing = len({pipeline.place_of(stage)[0] for stage in members})
        else:
            replica, members, missing = 0, tuple(range(pipeline.depth)), len(self._program.streams)
        key = (replica, instruction)
        if key not in self._exchanges:
            known_s = [each.seconds for each in self._program.tied if each.stages == members]
            ways = [(self._costs[stage], onward) for stage in members for onward in (True, False)]
            seconds = max(known_s or [costs.arrives_after_s(onward=onward) for costs, onward in ways])
            self._exchanges[key] = Exchange(
                number=len(self._exchanges),
                group=(members[0], Handed.EXCHANGE),
                seconds=seconds if missing > 1 else 0.0,
                missing=missing,
                line=None,
            )
        return self._exchanges[key]

    def _among_replicas(
        self, exchanges: dict[int, Exchange], stream: Stream, index: int, begun: set[int]
    ) -> Meet | None:
        """Enters an exchange of a stage's replicas where the worker meets it; returns how, None if it does not wait.

        All replicas exchange with each other, or a `source` sends to the others.
        """
        instruction = stream.instructions[index]
        assert isinstance(instruction, StartReduce | ReduceGradients)
        begins, source = isinstance(instruction, StartReduce), instruction.source
        stage = self._program.pipeline.stage_of(stream.stage, instruction.chunk)
        key = (stage, instruction.version)
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
                exchanges[index + 1] = exchange
            return None
        if exchange.number in begun and source == stream.rank:
            return None
        exchanges[index] = exchange
        return Meet.AWAIT if exchange.number in begun else Meet.EXCHANGE

    def _line(self, stage: int) -> ExchangeLine:
        """A stage's exchanges, one after another: through ports, or on links of their own."""
        if stage not in self._lines:
            costs = self._costs[stage]
            first_stage, _ = self._program.pipeline.place_of(stage)
            members = (s.rank for s in self._program.streams if s.stage == first_stage)
            devices = tuple(device for rank in members for device in self._devices[rank])
            way = Way(devices, None, costs.reduce_port_devices, costs.reduce_device_share)
            self._lines[stage] = ExchangeLine(self._route(way))
        return self._lines[stage]

    def _route(self, way: Way) -> Route:
        self._ways.append(way)
        self.routes.append(Route(number=len(self.routes)))
        return self.routes[-1]
