"""Play: a program's streams with given costs. Streams + stage costs -> Timeline.

Every worker executes its stream in order. A send passes its tensor to the link and does not wait. A receive waits for
the arrival. A gradient exchange waits for all replicas, and an exchange among stages waits for all of these. An
exchange that was begun earlier overlaps its workers' other work, on a separate link. The runtime does the same: its
timeline holds the same instructions.

Network levels have ports, and a level's bandwidth is that of its ports. A transfer across a level leaves one unit of
devices through this unit's port, and enters the other unit through the other's port. Tensors between one sender and one
receiver follow each other, and so do the exchanges of one stage. All other transfers that pass a port at the same time
share it (`network`). An exchange passes the ports of every unit once. If the costs name no port, every sender, receiver
and direction has a separate link, as in the papers' pictures.

The engine plays columns (`compile`). Every worker runs ahead as far as it can. When all workers wait, the network's
time advances to its next event; no later send can start before that event. A worker that continues computes before it
sends: a brief transfer that has its ports to itself arrives before that, and is no event.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from operator import mul

import numpy as np

from pipeplan.documents.stage_costs import StageCosts
from pipeplan.errors import ScheduleError
from pipeplan.programs.footprint import first_versions, held_counts, held_table
from pipeplan.programs.instructions import NUMBERS, BackwardInput
from pipeplan.programs.program import Program, Stream
from pipeplan.programs.text import format_instruction
from pipeplan.programs.timeline import Lane, Timeline
from pipeplan.simulation.columns import Column, Edge, Exchange, Group, Handed, Meet
from pipeplan.simulation.compile import Compiler
from pipeplan.simulation.network import Network


class Engine:
    """Plays a program. Streams may leave their transfers to be `implied`.

    `start_s` and `end_s` have an array for every rank, with an entry for every step of its column: when it has received
    the tensor that it waits for, and when its own seconds are over. `over_s` is when each rank has ended all of its
    steps.
    """

    def __init__(
        self,
        program: Program,
        costs: Sequence[StageCosts],
        devices: Sequence[Sequence[int]] = (),
        *,
        implied: bool = False,
    ) -> None:
        compiled = Compiler(program, costs, devices or [(s.rank,) for s in program.streams], implied=implied)
        ranks = range(len(program.streams))
        self._program = program
        self.columns = compiled.columns
        self._edges = compiled.edges
        self._exchanges = compiled.exchanges
        self._network = Network(compiled.routes, compiled.ports)
        routed = {edge.route.number: edge for edge in compiled.edges if edge.route is not None}
        least_s = [column.least_s for column in self.columns]
        for edge in routed.values():
            edge.look_around(routed, least_s)
        # The last is never reached.
        self._requests: list[tuple[float, Group, int, Edge | None]] = [(inf, (0, Handed.PART), -1, None)]
        self._ready = deque(ranks)
        self.start_s = [array("d") for _ in ranks]
        self.end_s = [array("d") for _ in ranks]
        self.over_s = [0.0 for _ in ranks]

    def play(self) -> None:
        """Plays to the end. Raises ScheduleError if a worker cannot reach its end, or a tensor is never received."""
        ready, wakes = self._ready, [self._worker(column).__next__ for column in self.columns]
        while True:
            while ready:
                wakes[ready.popleft()]()
            if not self._carry():
                break
        self._require_ends()

    def exchange_ends_s(self) -> Iterator[list[float]]:
        """By stage, when the exchanges of its gradients, or of weights that it shares, ended."""
        ends_s: dict[int, list[float]] = defaultdict(list)
        for exchange in self._exchanges:
            if exchange.end_s is not None:
                ends_s[exchange.group[0]].append(exchange.end_s)
        return iter(ends_s.values())

    def _require_ends(self) -> None:
        blocked = [column.rank for column in self.columns if len(self.end_s[column.rank]) < len(column.steps)]
        if blocked:
            raise ScheduleError(f"deadlock: {'; '.join(map(self._waits, blocked[:4]))}")
        for edge in self._edges:
            if len(edge.sent) > len(edge.received):
                raise ScheduleError(
                    f"rank {edge.sender} sends microbatch {edge.sent[len(edge.received)]} to rank {edge.receiver}, "
                    "which never receives it"
                )

    def _waits(self, rank: int) -> str:
        """Where a worker waits."""
        instruction = self._program.streams[rank].instructions[len(self.end_s[rank])]
        return f"rank {rank} waits at {format_instruction(instruction)}"

    def _worker(self, column: Column) -> Iterator[None]:
        """Plays one worker as far as it can go, and continues each time that it is woken."""
        rank, requests, wake = column.rank, self._requests, self._ready.append
        started, ended, now_s = self.start_s[rank].append, self.end_s[rank].append, 0.0
        for index, (receives, own_s, meet, sends) in enumerate(column.steps):
            start_s = now_s
            if receives is not None:
                while not receives.arrival_s:  # the tensor is yet to be sent: its arrival wakes the worker
                    receives.awaited = True
                    yield
                arrival_s = receives.arrival_s.popleft()
                start_s = (arrival_s if arrival_s > now_s else now_s) + receives.receives_s
            if meet is None:
                now_s = start_s + own_s
            else:
                while (over_s := self._exchange(column, index, start_s)) is None:
                    yield
                now_s = over_s
            started(start_s)
            ended(now_s)
            if sends is None:
                continue
            now_s += sends.sends_s
            if sends.route is not None:
                heappush(requests, (now_s, sends.group, sends.number, sends))
                if sends.watched:
                    sends.asked_s.append(now_s)
                continue
            sends.free_s = (sends.free_s if sends.free_s > now_s else now_s) + sends.seconds
            sends.arrival_s.append(sends.free_s + sends.latency_s)
            if sends.awaited:
                sends.awaited = False
                wake(sends.receiver)
        self.over_s[rank] = now_s
        yield

    def _exchange(self, column: Column, index: int, now_s: float) -> float | None:
        """When the exchange ends; None while a replica is missing, or it waits for its ports."""
        exchange, meet = column.exchanges[index], column.steps[index][2]
        if meet is Meet.COMPLETE:
            # The exchange began during this backward: only its tail remains. It occupies its link in one piece, and
            # ends when its parts would end, each of which waits for its gradient.
            end_s = now_s + column.steps[index][1]
            exchange.missing -= 1
            exchange.reached_s = max(exchange.reached_s, now_s, end_s + exchange.tail_s - exchange.alone_s)
            if not exchange.missing:
                self._hand_over(exchange)
            return end_s
        if exchange.end_s is not None:
            return exchange.end_s if exchange.end_s > now_s else now_s
        if meet is Meet.AWAIT:
            exchange.waiting.append(column.rank)
            return None
        exchange.missing -= 1
        exchange.reached_s = max(exchange.reached_s, now_s)
        exchange.waiting.append(column.rank)
        if not exchange.missing:
            self._hand_over(exchange)
        return None

    def _hand_over(self, exchange: Exchange) -> None:
        """All members have arrived."""
        if exchange.line is None:
            self._exchanged(exchange, exchange.reached_s + exchange.alone_s)
        else:
            heappush(self._requests, (exchange.reached_s, exchange.group, exchange.number, None))

    def _begin(self, exchange: Exchange, now_s: float) -> None:
        """Starts the next exchange of a route, inside the units."""
        assert exchange.line is not None
        exchange.line.busy = True
        heappush(self._requests, (now_s + exchange.inside_s, (exchange.group[0], Handed.PART), exchange.number, None))

    def _exchanged(self, exchange: Exchange, end_s: float) -> None:
        exchange.end_s = end_s
        self._ready.extend(exchange.waiting)
        if exchange.line is not None:
            exchange.line.busy = False
            if exchange.line.waiting:
                self._begin(exchange.line.waiting.popleft(), end_s)

    def _carry(self) -> bool:
        """Advances the network until a worker may continue: transfers arrive, others start. False if none can."""
        network, requests, ready, ends = self._network, self._requests, self._ready, self._network.ends
        while not ready:
            now_s = ends[0][0] if ends[0][0] < requests[0][0] else requests[0][0]
            if now_s == inf:
                return False
            while ends[0][0] <= now_s:
                thing, end_s = network.arrived()
                if isinstance(thing, Edge):
                    thing.arrival_s.append(end_s + thing.latency_s)
                    if thing.awaited:
                        thing.awaited = False
                        ready.append(thing.receiver)
                else:
                    assert isinstance(thing, Exchange)
                    self._exchanged(thing, end_s)
            while requests[0][0] <= now_s:
                _, group, number, edge = heappop(requests)
                if edge is None or edge.route is None:
                    self._hand_on(self._exchanges[number], group[1], now_s)
                elif not edge.watched or not edge.passes_alone(network.busy, now_s, ready):
                    network.start(edge.route, edge, edge.seconds, now_s)
            if network.changed:
                network.share_out(now_s)
        return True

    def _hand_on(self, exchange: Exchange, handed: Handed, now_s: float) -> None:
        """Lets an exchange begin, queue, or continue between units."""
        line = exchange.line
        assert line is not None
        if handed is Handed.PART:
            self._network.start(line.route, exchange, exchange.seconds, now_s)
        elif line.busy:
            line.waiting.append(exchange)
        else:
            self._begin(exchange, now_s)


def simulate(program: Program, costs: Sequence[StageCosts], devices: Sequence[Sequence[int]] = ()) -> Timeline:
    """The timeline of the program with these costs, one entry for every stage.

    `devices` are the ranks' devices, if a rank is not on the device of its own number: several if it represents
    replicas with equal streams. Takes O(n) for n instructions if no ports are shared. Raises ScheduleError if the
    streams cannot all be played to their end.
    """
    engine = Engine(program, costs, devices)
    engine.play()
    return Timeline(
        lanes=tuple(
            Lane(
                rank=stream.rank,
                stage=stream.stage,
                replica=stream.replica,
                instructions=tuple(stream.instructions),
                start_s=(0.0, *end_s[:-1])[: len(end_s)],
                end_s=tuple(end_s),
                memory_bytes=held_bytes(program, stream, costs),
            )
            for stream, end_s in zip(program.streams, engine.end_s, strict=True)
        ),
        batch_size=program.pipeline.batch_microbatches * costs[0].microbatch_size,
        batches=program.pipeline.batches,
    )


def peak_bytes(program: Program, stream: Stream, costs: Sequence[StageCosts], kinds: bytes) -> int:
    """The peak of a rank's bytes after its instructions (`held_bytes`), whose `kinds` are known."""
    pipeline, own = program.pipeline, costs[stream.stage]
    if pipeline.chunks == 1 and stream.instructions:
        recompute, by_block = (law(stream.stage) for law in (pipeline.recomputes, pipeline.recomputes_by_block))
        table = held_table(stream.instructions, recompute=recompute, by_block=by_block, numbers=kinds)
        each_bytes = own.each_held_bytes(split=NUMBERS[BackwardInput] in kinds)
        most_bytes = sum(map(mul, each_bytes, table.max(axis=1).tolist()))
        if most_bytes <= np.iinfo(np.int64).max:
            return own.always_bytes + int((np.asarray(each_bytes) @ table).max())
    return max(held_bytes(program, stream, costs), default=0)


def held_bytes(program: Program, stream: Stream, costs: Sequence[StageCosts]) -> tuple[int, ...]:
    """A rank's bytes after each instruction, over all its stages (`programs.footprint`)."""
    parts, pipeline = program.stage_streams(stream), program.pipeline
    by_chunk, left_by_chunk = [], []
    for part in parts:
        held_bytes = _HeldBytes(costs[part.stage], split=BackwardInput in map(type, part.instructions))
        recompute, by_block = (law(part.stage) for law in (pipeline.recomputes, pipeline.recomputes_by_block))
        counts = held_counts(part.instructions, recompute=recompute, by_block=by_block)
        by_chunk.append(tuple(map(held_bytes.__getitem__, counts)))
        if len(parts) == 1:
            return by_chunk[0]
        left = held_counts(part.instructions, recompute=recompute, by_block=True, settled=True) if by_block else ()
        left_by_chunk.append(tuple(map(held_bytes.__getitem__, left)) if by_block else by_chunk[-1])

    following = [zip(most, left, strict=True) for most, left in zip(by_chunk, left_by_chunk, strict=True)]
    versions = [len(first_versions(part.instructions)) for part in parts]
    now_bytes = [
        costs[part.stage].always_bytes + count * costs[part.stage].version_bytes
        for part, count in zip(parts, versions, strict=True)
    ]
    sums, all_bytes = [], sum(now_bytes)
    for instruction in stream.instructions:
        most_bytes, left_bytes = next(following[instruction.chunk])
        others_bytes = all_bytes - now_bytes[instruction.chunk]
        sums.append(others_bytes + most_bytes)
        all_bytes, now_bytes[instruction.chunk] = others_bytes + left_bytes, left_bytes
    return tuple(sums)


class _HeldBytes(dict[tuple[int, ...], int]):
    """The bytes of `held_counts`. Each value is computed once: few differ."""

    def __init__(self, costs: StageCosts, *, split: bool) -> None:
        super().__init__()
        self._costs, self._split = costs, split

    def __missing__(self, held: tuple[int, ...]) -> int:
        self[held] = self._costs.held_bytes(held, split=self._split)
        return self[held]
