"""The simulator again, as plainly as its docstring says it: for tests that the fast one is right."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeplan.documents.stage_costs import StageCosts
from pipeplan.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Recompute,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendGradient,
    StartReduce,
    Update,
)
from pipeplan.programs.program import Program

Port = tuple[bool, int, int]
"""Outwards or inwards, the devices behind it, and the number of its unit."""

LATER_S = 1e-12
"""Moments that differ by less are one."""


@dataclass
class Request:
    """Something that wants ports: a tensor, or a stage's exchange of gradients.

    What has the same `line` follows each other. `left_s` is what is left of it at full speed. `then` is what follows
    on other ports.
    """

    at_s: float
    line: object
    key: tuple[object, ...]
    left_s: float
    latency_s: float
    ports: list[Port]
    then: tuple[float, list[Port]] | None = None


def fair_speeds(ports: Sequence[Sequence[Port]]) -> list[float]:
    """The max-min fair speeds of things that pass these ports: at most 1, and 1 a port together.

    The port with the least for each is found, and what passes it gets that; then the same among the others.
    """
    speeds: dict[int, float] = {}
    while len(speeds) < len(ports):
        left = [index for index in range(len(ports)) if index not in speeds]
        each = {
            port: (1.0 - sum(speed for index, speed in speeds.items() if port in ports[index]))
            / sum(port in ports[index] for index in left)
            for port in {port for index in left for port in ports[index]}
        }
        least = min(each.values())
        if least >= 1:
            speeds |= dict.fromkeys(left, 1.0)
        else:
            tightest = min(each, key=lambda port: each[port])
            speeds |= {index: least for index in left if tightest in ports[index]}
    return [speeds[index] for index in range(len(ports))]


@dataclass
class Plain:
    """Everything by name, nothing by number; one instruction after the other."""

    program: Program
    costs: Sequence[StageCosts]
    devices: Sequence[int]
    times: list[list[tuple[float, float]]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    flying: list[Request] = field(default_factory=list)
    now_s: float = 0.0
    arrived: dict[tuple[object, ...], float] = field(default_factory=dict)
    reached: dict[tuple[object, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    free_s: dict[object, float] = field(default_factory=lambda: defaultdict(float))

    def play(self) -> list[list[tuple[float, float]]]:
        """Start and end of every instruction, by rank."""
        self.times = [[] for _ in self.program.streams]
        while True:
            while sum(self.step(rank) for rank in range(len(self.times))):
                pass
            if not self.requests and not self.flying:
                break
            self.fly()
        assert all(len(t) == len(s.instructions) for t, s in zip(self.times, self.program.streams, strict=True))
        return self.times

    def step(self, rank: int) -> bool:
        """The worker's next instruction, if it can have it."""
        stream, done = self.program.streams[rank], self.times[rank]
        if len(done) == len(stream.instructions):
            return False
        now_s = done[-1][1] if done else 0.0
        instruction = stream.instructions[len(done)]
        end_s = self.end_s(rank, instruction, now_s)
        if end_s is None:
            return False
        done.append((now_s, end_s))
        return True

    def end_s(  # noqa: C901 (one case an instruction)
        self, rank: int, instruction: Instruction, now_s: float
    ) -> float | None:
        stage = self.program.pipeline.stage_of(self.program.streams[rank].stage, instruction.chunk)
        costs = self.costs[stage]
        match instruction:
            case Forward():
                return now_s + (costs.forward_s + costs.instruction_s)
            case Recompute():
                return now_s + (costs.recompute_s + costs.instruction_s)
            case Backward():
                end_s = now_s + (costs.backward_s + costs.instruction_s)
                self.complete(rank, stage, now_s, end_s)
                return end_s
            case BackwardInput():
                return now_s + (costs.backward_input_s + costs.instruction_s)
            case BackwardWeight(microbatches=several):
                end_s = now_s + (len(several) * costs.backward_weight_s + costs.instruction_s)
                self.complete(rank, stage, now_s, end_s)
                return end_s
            case Update():
                return now_s + costs.update_s
            case SendActivation(microbatch=k, peer=peer) | SendGradient(microbatch=k, peer=peer):
                gradient = isinstance(instruction, SendGradient)
                message_s = costs.gradient_message_s if gradient else costs.activation_message_s
                end_s = now_s + (costs.instruction_s + costs.message_s + message_s)
                self.send(rank, peer, gradient, k, stage, end_s)
                return end_s
            case RecvActivation(microbatch=k, peer=peer) | RecvGradient(microbatch=k, peer=peer):
                gradient = isinstance(instruction, RecvGradient)
                arrival_s = self.arrived.get((peer, rank, gradient, k, stage + 1 if gradient else stage - 1))
                message_s = costs.activation_message_s if gradient else costs.gradient_message_s
                own_s = costs.instruction_s + costs.message_s + message_s
                return None if arrival_s is None else max(now_s, arrival_s) + own_s
            case StartReduce():
                return now_s
            case ReduceGradients(version=version):
                if self.was_begun(rank, instruction):
                    if instruction.source == rank:
                        return now_s
                    end_s = self.arrived.get(("exchange", stage, version), -1.0)
                    return None if end_s < 0 else max(now_s, end_s)
                return self.exchange(rank, version, stage, now_s)
            case _:
                return now_s

    def was_begun(self, rank: int, exchange: ReduceGradients) -> bool:
        start = StartReduce(exchange.version, exchange.chunk, exchange.source)
        return start in self.program.streams[rank].instructions

    def complete(self, rank: int, stage: int, start_s: float, end_s: float) -> None:
        """A backward is over: if an exchange was begun right before it, its gradients are complete."""
        stream = self.program.streams[rank]
        before = stream.instructions[len(self.times[rank]) - 1] if self.times[rank] else None
        if not isinstance(before, StartReduce):
            return
        costs, key = self.costs[stage], ("exchange", stage, before.version)
        split = isinstance(stream.instructions[len(self.times[rank])], BackwardWeight)
        tail_s = costs.exchange_tail_s(split=split)
        self.reached[key].append(max(start_s, end_s + tail_s - costs.reduce_s))
        if len(self.reached[key]) < (self.program.pipeline.replicas[stage] if before.source is None else 1):
            return
        at_s = max(self.reached[key])
        if costs.reduce_s == 0:
            self.arrived[key] = at_s
        else:
            self.exchange_on_ports(stage, key, at_s)

    def exchange_on_ports(self, stage: int, key: tuple[object, ...], at_s: float) -> None:
        """What happens inside the units comes first, then the ports."""
        costs, ports = self.costs[stage], self.ring(stage)
        inside_s = costs.reduce_inside_s if costs.reduce_port_devices else 0.0
        line = ("exchange", stage)
        then = costs.reduce_s - inside_s, ports or [(True, 0, stage)]
        self.requests.append(Request(at_s, line, key, inside_s, 0.0, [(True, -1, stage)], then))

    def ring(self, stage: int) -> list[Port]:
        """The ports of the units in which a stage's replicas are."""
        behind = self.costs[stage].reduce_port_devices
        if behind == 0:
            return []
        first_stage, _ = self.program.pipeline.place_of(stage)
        units = {self.devices[s.rank] // behind for s in self.program.streams if s.stage == first_stage}
        return [(out, behind, unit) for unit in units for out in (True, False)]

    def send(self, rank: int, peer: int, gradient: bool, k: int, stage: int, now_s: float) -> None:
        costs = self.costs[stage]
        seconds = costs.gradient_transfer_s if gradient else costs.activation_transfer_s
        behind = costs.gradient_port_devices if gradient else costs.activation_port_devices
        latency_s = costs.latency_s + (costs.gradient_latency_s if gradient else costs.activation_latency_s)
        units = [self.devices[r] // behind if behind else r for r in (rank, peer)]
        key = (rank, peer, gradient, k, stage)
        if seconds == 0 or behind == 0 or units[0] == units[1]:
            link = ("link", rank, peer, gradient, stage)
            self.free_s[link] = max(self.free_s[link], now_s) + seconds
            self.arrived[key] = self.free_s[link] + latency_s
        else:
            ports = [(True, behind, units[0]), (False, behind, units[1])]
            line = (rank, peer, gradient, stage)
            self.requests.append(Request(now_s, line, key, seconds, latency_s, ports))

    def exchange(self, rank: int, version: int, stage: int, now_s: float) -> float | None:
        costs, key = self.costs[stage], ("exchange", stage, version)
        if key in self.arrived:
            return self.arrived[key]
        if ("waits", rank, *key) in self.arrived:
            return None
        self.arrived["waits", rank, *key] = now_s
        self.reached[key].append(now_s)
        if len(self.reached[key]) < self.program.pipeline.replicas[stage]:
            return None
        at_s, behind = max(self.reached[key]), costs.reduce_port_devices
        if behind == 0 or costs.reduce_s == 0:
            self.arrived[key] = at_s + costs.reduce_s
            return self.arrived[key]
        self.exchange_on_ports(stage, key, at_s)
        return None

    def fly(self) -> None:
        """Lets time pass until something arrives or starts."""
        speeds = fair_speeds([one.ports for one in self.flying])
        ends_s = [self.now_s + one.left_s / speed for one, speed in zip(self.flying, speeds, strict=True)]
        busy = {one.line for one in self.flying}
        starts_s = [max(one.at_s, self.now_s) for one in self.requests if one.line not in busy]
        until_s = min(ends_s + starts_s)
        for one, speed in zip(self.flying, speeds, strict=True):
            one.left_s -= speed * (until_s - self.now_s)
        goes_on = []
        for one, end_s in zip(self.flying, ends_s, strict=True):
            if end_s > until_s + LATER_S:
                goes_on.append(one)
            elif one.then is not None:
                one.left_s, one.ports = one.then
                one.then = None
                goes_on.append(one)
            else:
                self.arrived[one.key] = until_s + one.latency_s
        self.flying = goes_on
        self.now_s = until_s
        for one in sorted(self.requests, key=lambda each: each.at_s):
            if one.at_s <= until_s + LATER_S and one.line not in {other.line for other in self.flying}:
                self.flying.append(one)
                self.requests.remove(one)
