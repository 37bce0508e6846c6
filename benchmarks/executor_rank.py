"""One of the processes of `benchmarks.executor`."""

import json
import os
import sys
import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan.documents.plan import Plan
from pipeplan.programs.instructions import (
    Backward,
    Forward,
    Instruction,
    Recompute,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    Update,
)
from pipeplan.simulation.predict import program_of
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.engine.clocks import HostClock
from worker_agent.engine.devices import place_process
from worker_agent.engine.lines import open_lines
from worker_agent.models.chain import build_model
from worker_agent.runtime.executor import Executor, Hooks
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.mail import Mail, edges_of
from worker_agent.runtime.own_blocks import own_blocks
from worker_agent.runtime.rank_part import RankPart
from worker_agent.runtime.recorder import Recorder
from worker_agent.runtime.status import StatusWriter

STAGES, MIDDLE, MICROBATCHES, BATCHES = 3, 1, 8, 100
BLOCKS = (1, 8)
WIDTH, SAMPLES = 8, 2
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "recomputing": {"schedule": "1f1b", "recompute": True},
    "2BP": {"schedule": "1f1b", "split_backward": True},
    "pipedream-2bw": {"schedule": "pipedream-2bw"},
}
BY_HAND: dict[str, Any] = {"schedule": "1f1b", "split_backward": False}
"""The differences of the hand-written loop: one version of the weights, and the whole backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Microseconds of every instruction, by kind: in the executor, and in a loop written by hand."""

    taken_us: dict[str, list[float]]
    by_hand_us: dict[str, list[float]]


class ThreadClock(HostClock):
    """The processor time of the executing thread."""

    def mark(self) -> None:
        """Records the time."""
        self._marks_s.append(time.thread_time())


class Kinds(Recorder):
    """A recorder of every instruction's time: from the end of the previous one to its own end."""

    def __init__(self, clock: ThreadClock) -> None:
        super().__init__(clock)
        self._processor = clock
        self._kinds: list[str] = []

    def end(self, instruction: Instruction, memory_bytes: int | None) -> None:
        """Records that the instruction is done, and the bytes now held."""
        self._kinds.append(type(instruction).__name__)
        super().end(instruction, memory_bytes)

    def taken_us(self) -> dict[str, list[float]]:
        """By kind, without the first batches, in which buffers and optimizer states are made."""
        found: dict[str, list[float]] = defaultdict(list)
        pairs = list(zip(self._kinds[1:], pairwise(self._processor.seconds()[1::2]), strict=True))
        for kind, (start_s, end_s) in pairs[len(pairs) // 10 :]:
            found[kind].append(1e6 * (end_s - start_s))
        return dict(found)


def plan_for(blocks: int, *, schedule: str, recompute: bool = False, split_backward: bool = False) -> Plan:
    """Stages of so many blocks each."""
    return make_plan(
        schedule,
        tuple(range(0, (STAGES + 1) * blocks, blocks)),
        microbatch_size=SAMPLES,
        microbatches=MICROBATCHES,
        recompute=recompute,
        dtype="float32",
        split_backward=split_backward,
    )


def linear_layers(*, count: int) -> list[nn.Module]:
    """Blocks of one small product each."""
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def executed(plan: Plan, blocks: int, rank: int, device: torch.device, folder: Path) -> dict[str, list[float]]:
    """Microseconds of every instruction of this rank, by kind."""
    spec = f"benchmarks.executor_rank:linear_layers?count={STAGES * blocks}"
    job = RunJob(plan=plan, model=spec, data="-", steps=BATCHES, learning_rate=1e-3, out=str(folder), device="cpu")
    program = program_of(plan, batches=BATCHES)
    stream = program.streams[rank]
    chain = build_model(spec, seed=0)
    (own,) = own_blocks(job.plan, chain, [stream.stage])
    part = RankPart(job, program, chain, stream, device, own=own, loss_scale=None)
    lines = open_lines({edge for s in program.streams for edge in edges_of(s)}, rank)
    recorder = Kinds(ThreadClock())
    inputs, targets = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    status = StatusWriter(folder / f"{rank}.status")
    executor = Executor(
        stream=stream,
        stage=part.stage,
        weights=part.weights,
        mail=Mail(program, rank, lines, device),
        replicas=None,
        recorder=recorder,
        hooks=Hooks(
            on_instruction=lambda index, _: status.at(index), on_update=lambda *_: None, on_checkpoint=lambda _: None
        ),
        inputs=(lambda _: inputs) if part.first else None,
        targets=(lambda _: targets) if part.last else None,
        update_microbatches=MICROBATCHES,
    )
    dist.barrier()
    executor.run()
    return recorder.taken_us()


class ByHand:
    """The same instructions in a loop that makes only the necessary calls of torch and gloo."""

    def __init__(self, plan: Plan, blocks: int, rank: int) -> None:
        layers = linear_layers(count=blocks)
        self._instructions = program_of(plan, batches=BATCHES).streams[rank].instructions
        self._module = nn.Sequential(*layers)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-3, fused=True)
        self._recompute = plan.stages[rank].recompute
        self._x = torch.randn(SAMPLES, WIDTH) if rank == 0 else None
        self._targets = torch.randn(SAMPLES, WIDTH) if rank == STAGES - 1 else None
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def taken_us(self) -> dict[str, list[float]]:
        """Microseconds by kind, without the first batches."""
        found: dict[str, list[float]] = defaultdict(list)
        for index, instruction in enumerate(self._instructions):
            start_s = time.thread_time()
            self._execute(instruction)
            if index >= len(self._instructions) // 10:
                found[type(instruction).__name__].append(1e6 * (time.thread_time() - start_s))
        while self._sent:
            self._sent.popleft()[0].wait()
        return dict(found)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case RecvActivation(microbatch=k, peer=peer):
                self._inputs[k] = self._receive(peer, 0).requires_grad_()
            case RecvGradient(microbatch=k, peer=peer):
                self._gradients[k] = self._receive(peer, 1)
            case Forward(microbatch=k):
                with torch.set_grad_enabled(not self._recompute):
                    self._forward(k)
            case Recompute(microbatch=k):
                self._forward(k)
            case Backward(microbatch=k):
                gradient = None if self._targets is not None else self._gradients.pop(k)
                self._outputs.pop(k).backward(gradient)  # type: ignore[no-untyped-call]
            case SendActivation() | SendGradient():
                self._send(instruction)
            case Update():
                self._optimizer.step()
                self._optimizer.zero_grad()

    def _forward(self, k: int) -> None:
        output = self._module(self._inputs[k] if self._x is None else self._x)
        self._outputs[k] = output if self._targets is None else nn.functional.mse_loss(output, self._targets)

    def _receive(self, peer: int, tag: int) -> Tensor:
        buffer = torch.empty(SAMPLES, WIDTH)
        dist.recv(buffer, peer, tag=tag)
        return buffer

    def _send(self, instruction: SendActivation | SendGradient) -> None:
        k, forward = instruction.microbatch, isinstance(instruction, SendActivation)
        tensor = self._outputs[k].detach() if forward else self._inputs.pop(k).grad
        assert tensor is not None
        self._sent.append((dist.isend(tensor, instruction.peer, tag=0 if forward else 1), tensor))
        if len(self._sent) > 2 * STAGES:
            self._sent.popleft()[0].wait()


def main(case: str, blocks: int, folder: Path) -> None:
    """Executes, and writes the times."""
    rank = int(os.environ["RANK"])
    device = place_process("cpu", rank, STAGES)
    dist.init_process_group("gloo")
    plan, plain = plan_for(blocks, **CASES[case]), plan_for(blocks, **CASES[case] | BY_HAND)
    taken_us = executed(plan, blocks, rank, device, folder)
    dist.barrier()
    figures = Figures(taken_us=taken_us, by_hand_us=ByHand(plain, blocks, rank).taken_us())
    folder.joinpath(f"{rank}.json").write_text(json.dumps(asdict(figures)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
