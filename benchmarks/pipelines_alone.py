"""One process of the ceiling of `benchmarks.pipelines`: it trains the whole model by itself."""

import sys

import torch
from torch import nn

from benchmarks.turns import Turn
from benchmarks.workload import LEARNING_RATE, MICROBATCH_SIZE, RANKS, WORKLOADS, Workload
from worker_agent.engine.devices import place_process
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import default_loss


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


def main(workload: str, microbatches: int) -> None:
    """Works in turn with the other contenders until there is no more to do."""
    turn = Turn()
    place_process("cpu", turn.rank, turn.ranks)
    alone(WORKLOADS[workload], turn, microbatches)
    turn.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
