"""One process of a contender of `benchmarks.pipelines`: our executor, torch's own, or a process alone."""

import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks.turns import Turn
from benchmarks.workload import (
    LEARNING_RATE,
    MICROBATCH_SIZE,
    OURS,
    RANKS,
    THEIRS,
    WORKLOADS,
    Ours,
    Theirs,
    Workload,
    plan_for,
)
from pipeplan.programs.instructions import Instruction, Update
from pipeplan.simulation.predict import program_of
from worker_agent.engine.devices import place_process
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import default_loss
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.rank import Rank
from worker_agent.runtime.status import StatusWriter


class Gate(StatusWriter):
    """A rank's status, which waits for its turn before its stream, and again after every number of batches."""

    def __init__(self, path: Path, instructions: Sequence[Instruction], turn: Turn, batches: int) -> None:
        super().__init__(path)
        last = {i.version: index for index, i in enumerate(instructions) if isinstance(i, Update)}
        self._stops = {0} | {last[version] + 1 for version in last if version % batches == 0}
        self._turn = turn

    def at(self, instruction: int) -> None:
        """The rank starts this instruction of its stream."""
        if instruction in self._stops:
            self._turn.take()
        super().at(instruction)


def ours(contender: Ours, work: Workload, turn: Turn, device: torch.device, microbatches: int, rounds: int) -> None:
    """Our executor under one of our schedules. A round ends with an update, not with an empty pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        batches = work.batches_a_round(microbatches)
        steps = batches * (rounds + 1)
        job = RunJob(
            plan=plan_for(contender, microbatches, work),
            model=work.model,
            data=work.data,
            steps=steps,
            learning_rate=LEARNING_RATE,
            out=folder,
            device="cpu",
        )
        program = program_of(job.plan, batches=steps)
        rank = Rank(job, program, build_model(work.model, seed=job.seed), turn.rank, device)
        rank.execute(Gate(Path(folder) / "status", rank.stream.instructions, turn, batches))
    turn.take()


def theirs(contender: Theirs, work: Workload, turn: Turn, device: torch.device, microbatches: int) -> None:
    """One of torch.distributed.pipelining's schedules."""
    kind: Any = getattr(pipelining, contender.schedule)
    numbers = _stages_of(turn.rank, contender.chunks, v_shaped="ZBV" in contender.schedule)
    blocks, cuts = build_model(work.model, seed=0).blocks, work.cuts[contender.chunks]
    modules = [nn.Sequential(*blocks[cuts[s] : cuts[s + 1]]) for s in numbers]
    del blocks
    stages = [pipelining.PipelineStage(m, s, len(cuts) - 1, device) for m, s in zip(modules, numbers, strict=True)]
    divided = partial(_divided_loss, microbatches=microbatches)
    options = {"loss_fn": divided, "scale_grads": False} if contender.lean else {"loss_fn": default_loss}
    schedule = kind(stages if contender.chunks > 1 else stages[0], n_microbatches=microbatches, **options)
    asked = {"return_outputs": False} if contender.lean else {}
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=LEARNING_RATE, fused=True)
    source = open_data(work.data, microbatch_size=MICROBATCH_SIZE, seed=0)
    first, last = 0 in numbers, len(cuts) - 2 in numbers
    dist.barrier()
    step = 0
    while turn.take():
        for _ in range(work.batches_a_round(microbatches)):
            pairs = [source.microbatch(step * microbatches + k) for k in range(microbatches)]
            inputs = [_joined(i for i, _ in pairs)] if first else []
            targets = {"target": _joined(t for _, t in pairs), "losses": []} if last else {}
            schedule.step(*inputs, **targets, **asked)
            optimizer.step()
            optimizer.zero_grad()
            step += 1


def _divided_loss(outputs: Tensor, targets: Tensor, *, microbatches: int) -> Tensor:
    """A microbatch's part of the batch's mean loss."""
    return default_loss(outputs, targets) / microbatches


def _joined(microbatches: Iterable[Any]) -> Tensor:
    """A batch of a model that takes one tensor."""
    return torch.cat(list(microbatches))


def _stages_of(rank: int, chunks: int, *, v_shaped: bool) -> list[int]:
    """The stages of a process: every `RANKS`-th, or down and up again."""
    if v_shaped:
        return [rank, 2 * RANKS - 1 - rank]
    return [rank + chunk * RANKS for chunk in range(chunks)]


def alone(work: Workload, turn: Turn, microbatches: int) -> None:
    """The ceiling: each process trains the whole model by itself on half of the microbatches, without the other."""
    module = nn.Sequential(*build_model(work.model, seed=0).blocks)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, fused=True)
    source = open_data(work.data, microbatch_size=MICROBATCH_SIZE, seed=0)
    step = 0
    while turn.take():
        for _ in range(work.batches_a_round(microbatches)):
            for k in range(turn.rank, microbatches, RANKS):
                inputs, targets = source.microbatch(step * microbatches + k)
                torch.autograd.backward(default_loss(module(inputs), targets) / microbatches)
            optimizer.step()
            optimizer.zero_grad()
            step += 1


def main(name: str, microbatches: int, rounds: int, workload: str) -> None:
    """Works in turn with the other contenders until there is no more to do."""
    turn, work = Turn(), WORKLOADS[workload]
    device = place_process("cpu", turn.rank, turn.ranks)
    if name in OURS:
        ours(OURS[name], work, turn, device, microbatches, rounds)
    elif name in THEIRS:
        theirs(THEIRS[name], work, turn, device, microbatches)
    else:
        alone(work, turn, microbatches)
    turn.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
