"""One process of a contender of `benchmarks.pipelines`: one of torch's own pipelines.

Our executor runs from another module: `torch.distributed.pipelining` takes 70 MiB by being imported.
"""

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks.turns import Turn
from benchmarks.workload import LEARNING_RATE, MICROBATCH_SIZE, RANKS, THEIRS, WORKLOADS, Theirs, Workload
from worker_agent.engine.devices import place_process
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import default_loss


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


def main(name: str, workload: str, microbatches: int) -> None:
    """Works in turn with the other contenders until there is no more to do."""
    turn = Turn()
    device = place_process("cpu", turn.rank, turn.ranks)
    theirs(THEIRS[name], WORKLOADS[workload], turn, device, microbatches)
    turn.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
