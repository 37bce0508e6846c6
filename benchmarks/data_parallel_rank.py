"""One of the two processes of `benchmarks.data_parallel`: the same work under our executor and torch's DDP, in turn."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload import GPT2, LEARNING_RATE, MICROBATCH_SIZE, Ours, plan_for
from pipeplan.documents.plan import Plan, Stage
from pipeplan.programs.program import pipelines_in_a_row
from worker_agent.engine.devices import place_process
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import default_loss
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.rank import Rank
from worker_agent.runtime.status import StatusWriter

REPLICAS, MICROBATCHES, BATCHES, ROUNDS = 2, 4, 8, 7
PEER = "torch DistributedDataParallel"
OURS = {"pipeplan data-parallel": "data-parallel", "pipeplan data-parallel-asp": "data-parallel-asp"}

Contender = Callable[[], float]
"""Runs the fixed work once; returns the seconds of all batches but the first, in which both prepare exchanges."""


def replicated(schedule: str) -> Plan:
    """The whole model on each of the replicas."""
    plan = plan_for(Ours(schedule="1f1b"), MICROBATCHES)
    return replace(
        plan,
        schedule=schedule,
        stages=(Stage(start=0, stop=GPT2.cuts[1][-1], replicas=REPLICAS),),
        costs=plan.costs[:1],
        placement=pipelines_in_a_row((REPLICAS,)),
        batch_size=MICROBATCH_SIZE * MICROBATCHES * REPLICAS,
    )


def ours(schedule: str, rank: int, device: torch.device) -> Contender:
    """Our executor under one of our schedules."""
    first_update = f"U{REPLICAS}" if schedule == "data-parallel-asp" else "U1"

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            job = RunJob(
                plan=replicated(schedule),
                model=GPT2.model,
                data=GPT2.data,
                steps=BATCHES,
                learning_rate=LEARNING_RATE,
                out=folder,
                device="cpu",
            )
            chain = build_model(GPT2.model, seed=job.seed)
            lane = Rank(job, job.program(), chain, rank, device).execute(StatusWriter(Path(folder) / "status")).lane
        return lane.end_s[-1] - lane.end_s[lane.instructions.index(first_update)]

    return run


def theirs(rank: int, *, lean: bool) -> Contender:
    """torch's DDP as in its documentation: synchronised only in the last microbatch of a batch.

    `lean`: gradients are views of the buckets that are exchanged, and are not copied there.
    """

    def run() -> float:
        module = DistributedDataParallel(
            nn.Sequential(*build_model(GPT2.model, seed=0).blocks), gradient_as_bucket_view=lean
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, fused=True)
        source = open_data(GPT2.data, microbatch_size=MICROBATCH_SIZE, seed=0)
        dist.barrier()
        started_s = 0.0
        for step in range(BATCHES):
            for turn in range(MICROBATCHES):
                inputs, targets = source.microbatch((step * MICROBATCHES + turn) * REPLICAS + rank)
                with module.no_sync() if turn < MICROBATCHES - 1 else nullcontext():
                    torch.autograd.backward(default_loss(module(inputs), targets) / MICROBATCHES)
            optimizer.step()
            optimizer.zero_grad()
            started_s = started_s or time.perf_counter()
        ended_s = time.perf_counter()
        dist.barrier()
        return ended_s - started_s

    return run


def main() -> None:
    """Runs every contender in turn, `ROUNDS` times; writes the seconds of each."""
    rank = int(os.environ["RANK"])
    device = place_process("cpu", rank, REPLICAS)
    dist.init_process_group("gloo")
    contenders: dict[str, Contender] = {name: ours(schedule, rank, device) for name, schedule in OURS.items()}
    contenders |= {PEER: theirs(rank, lean=False), f"{PEER}, lean": theirs(rank, lean=True)}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            found[name].append(run())
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
