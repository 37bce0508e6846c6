"""Simulate: plays a program's streams with given costs. Streams + stage costs -> Timeline.

Every worker executes its stream in order. A send hands its tensor to the link and goes on; a link carries one tensor
at a time in each direction, first in first out; a receive waits for the arrival. A gradient exchange waits for all
replicas. This is what the runtime does, so the two timelines hold the same instructions.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from planner_service.core.errors import ScheduleError
from planner_service.core.schedule.footprint import footprints
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
    SendActivation,
    SendGradient,
    Update,
)
from planner_service.core.schedule.program import Program, Stream
from planner_service.core.schedule.text import format_instruction
from planner_service.core.stage_costs import StageCosts
from planner_service.core.timeline import Lane, Timeline

_Edge = tuple[int, int, bool]
"""Sender, receiver, and whether it carries gradients: the two directions of a pair are separate links."""


@dataclass(slots=True)
class _Player:
    """One worker's progress through its stream."""

    stream: Stream
    costs: StageCosts
    index: int = 0
    now_s: float = 0.0
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)

    def done(self) -> bool:
        return self.index == len(self.stream.instructions)

    def take(self, end_s: float) -> None:
        self.start_s.append(self.now_s)
        self.end_s.append(end_s)
        self.now_s = end_s
        self.index += 1


class _Links:
    """Tensors under way: when each directed edge is free again, and what arrives when."""

    def __init__(self) -> None:
        self._free_s: dict[_Edge, float] = defaultdict(float)
        self._arrivals: dict[_Edge, deque[tuple[int, float]]] = defaultdict(deque)

    def send(self, edge: _Edge, microbatch: int, now_s: float, costs: StageCosts) -> None:
        duration_s = costs.gradient_transfer_s if edge[2] else costs.activation_transfer_s
        self._free_s[edge] = max(self._free_s[edge], now_s) + duration_s
        self._arrivals[edge].append((microbatch, self._free_s[edge] + costs.latency_s))

    def arrival_s(self, edge: _Edge, microbatch: int) -> float | None:
        """When the next tensor on the edge arrives; None while it has not been sent."""
        if not self._arrivals[edge]:
            return None
        sent, arrival_s = self._arrivals[edge][0]
        if sent != microbatch:
            raise ScheduleError(
                f"rank {edge[1]} waits for microbatch {microbatch} from rank {edge[0]}, which sends {sent} first"
            )
        self._arrivals[edge].popleft()
        return arrival_s

    def undelivered(self) -> list[tuple[_Edge, int]]:
        return [(edge, queue[0][0]) for edge, queue in self._arrivals.items() if queue]


class _Engine:
    """Advances every worker as far as it can go, until all are done or none can."""

    def __init__(self, program: Program, costs: Sequence[StageCosts]) -> None:
        self.players = [_Player(stream, costs[stream.stage]) for stream in program.streams]
        self.links = _Links()
        self._replicas = program.pipeline.replicas
        self._reached: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)

    def play(self) -> None:
        ready = deque(range(len(self.players)))
        while ready:
            player = self.players[ready.popleft()]
            while not player.done():
                woken = self._step(player, player.stream.instructions[player.index])
                if woken is None:
                    break
                ready.extend(woken)
        self._require_done()

    def _step(self, player: _Player, instruction: Instruction) -> Sequence[int] | None:
        """Executes the instruction; returns the ranks that it may have woken, or None if it must wait."""
        rank = player.stream.rank
        match instruction:
            case SendActivation(microbatch=k, peer=peer):
                return self._send(player, (rank, peer, False), k)
            case SendGradient(microbatch=k, peer=peer):
                return self._send(player, (rank, peer, True), k)
            case RecvActivation(microbatch=k, peer=peer):
                return self._receive(player, (peer, rank, False), k)
            case RecvGradient(microbatch=k, peer=peer):
                return self._receive(player, (peer, rank, True), k)
            case ReduceGradients(version=version):
                return self._reduce(player, version)
            case _:
                player.take(player.now_s + _duration_s(instruction, player.costs))
                return ()

    def _send(self, player: _Player, edge: _Edge, microbatch: int) -> Sequence[int]:
        player.take(player.now_s + player.costs.instruction_s)
        self.links.send(edge, microbatch, player.now_s, player.costs)
        return (edge[1],)

    def _receive(self, player: _Player, edge: _Edge, microbatch: int) -> Sequence[int] | None:
        arrival_s = self.links.arrival_s(edge, microbatch)
        if arrival_s is None:
            return None
        player.take(max(player.now_s, arrival_s) + player.costs.instruction_s)
        return ()

    def _reduce(self, player: _Player, version: int) -> Sequence[int] | None:
        stage = player.stream.stage
        reached = self._reached[stage, version]
        reached[player.stream.rank] = player.now_s
        if len(reached) < self._replicas[stage]:
            return None
        player.take(max(reached.values()) + player.costs.reduce_s)
        return [rank for rank in reached if rank != player.stream.rank]

    def _require_done(self) -> None:
        blocked = [p for p in self.players if not p.done()]
        if blocked:
            waits = "; ".join(
                f"rank {p.stream.rank} waits at {format_instruction(p.stream.instructions[p.index])}"
                for p in blocked[:4]
            )
            raise ScheduleError(f"deadlock: {waits}")
        for edge, microbatch in self.links.undelivered():
            raise ScheduleError(
                f"rank {edge[0]} sends microbatch {microbatch} to rank {edge[1]}, which never receives it"
            )


def simulate(program: Program, costs: Sequence[StageCosts]) -> Timeline:
    """The timeline of the program with these costs, one entry a stage. Linear in the number of instructions.

    Raises ScheduleError if the streams cannot all be played to their end.
    """
    engine = _Engine(program, costs)
    engine.play()
    return Timeline(
        lanes=tuple(_lane(player, program.pipeline.recomputes(player.stream.stage)) for player in engine.players),
        batch_size=program.pipeline.batch_microbatches * costs[0].microbatch_size,
        batches=program.pipeline.batches,
    )


def _lane(player: _Player, recompute: bool) -> Lane:
    stream = player.stream
    held = footprints(stream.instructions, recompute=recompute)
    return Lane(
        rank=stream.rank,
        stage=stream.stage,
        replica=stream.replica,
        instructions=tuple(format_instruction(i) for i in stream.instructions),
        start_s=tuple(player.start_s),
        end_s=tuple(player.end_s),
        memory_bytes=tuple(
            player.costs.held_bytes(versions=h.versions, activations=h.activations, inputs=h.inputs) for h in held
        ),
    )


def _duration_s(instruction: Instruction, costs: StageCosts) -> float:
    match instruction:
        case Forward():
            return costs.forward_s + costs.instruction_s
        case Recompute():
            return costs.recompute_s + costs.instruction_s
        case Backward():
            return costs.backward_s + costs.instruction_s
        case BackwardInput():
            return costs.backward_input_s + costs.instruction_s
        case BackwardWeight(microbatches=numbers):
            return len(numbers) * costs.backward_weight_s + costs.instruction_s
        case Update():
            return costs.update_s
        case Checkpoint() | ReduceGradients():
            return 0.0
        case SendActivation() | SendGradient() | RecvActivation() | RecvGradient():
            return costs.instruction_s
        case _:
            assert_never(instruction)
