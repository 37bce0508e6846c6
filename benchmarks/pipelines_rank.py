"""One of the two processes of `benchmarks.pipelines`: the same work under our executor and torch's own, in turn."""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.workload import (
    BATCHES,
    CUTS,
    DATA,
    LEARNING_RATE,
    MICROBATCH_SIZE,
    MICROBATCHES,
    MODEL,
    OURS,
    ROUNDS,
    plan_for,
)
from planner_service.core.predict import program_of
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import default_loss
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.placement import place_process
from worker_agent.runtime.rank import Rank
from worker_agent.runtime.status import StatusWriter

Contender = Callable[[], float]
"""Runs the fixed work once; returns the seconds of its steps."""


def ours(schedule: str, rank: int, device: torch.device) -> Contender:
    """Our executor under one of our schedules."""

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            job = RunJob(
                plan=plan_for(schedule),
                model=MODEL,
                data=DATA,
                steps=BATCHES,
                learning_rate=LEARNING_RATE,
                out=folder,
                device="cpu",
            )
            program = program_of(job.plan, batches=BATCHES)
            chain = build_model(MODEL, seed=job.seed)
            lane = Rank(job, program, chain, rank, device).execute(StatusWriter(Path(folder) / "status")).lane
        return lane.end_s[-1] - lane.start_s[0]

    return run


def theirs(kind: type[Schedule1F1B] | type[ScheduleGPipe], rank: int, device: torch.device) -> Contender:
    """torch.distributed.pipelining, one stage a process."""

    def run() -> float:
        chain = build_model(MODEL, seed=0)
        module = nn.Sequential(*chain.blocks[CUTS[rank] : CUTS[rank + 1]])
        stage = PipelineStage(module, rank, len(CUTS) - 1, device)
        schedule = kind(stage, n_microbatches=MICROBATCHES, loss_fn=default_loss)
        optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, fused=True)
        source = open_data(DATA, microbatch_size=MICROBATCH_SIZE, seed=0)
        dist.barrier()
        started_s = time.perf_counter()
        for step in range(BATCHES):
            numbers = range(step * MICROBATCHES, (step + 1) * MICROBATCHES)
            inputs, targets = zip(*(source.microbatch(k) for k in numbers), strict=True)
            _torch_step(schedule, rank, torch.cat(inputs), torch.cat(targets))
            optimizer.step()
            optimizer.zero_grad()
        ended_s = time.perf_counter()
        dist.barrier()
        return ended_s - started_s

    return run


def _torch_step(schedule: Schedule1F1B | ScheduleGPipe, rank: int, inputs: Tensor, targets: Tensor) -> None:
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=[])


def alone(rank: int) -> Contender:
    """The ceiling: each process trains the whole model by itself on half of the microbatches, without the other."""

    def run() -> float:
        module = nn.Sequential(*build_model(MODEL, seed=0).blocks)
        optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, fused=True)
        source = open_data(DATA, microbatch_size=MICROBATCH_SIZE, seed=0)
        dist.barrier()
        started_s = time.perf_counter()
        for step in range(BATCHES):
            for k in range(rank, MICROBATCHES, 2):
                inputs, targets = source.microbatch(step * MICROBATCHES + k)
                torch.autograd.backward(default_loss(module(inputs), targets) / MICROBATCHES)
            optimizer.step()
            optimizer.zero_grad()
        ended_s = time.perf_counter()
        dist.barrier()
        return ended_s - started_s

    return run


def main() -> None:
    """Runs every contender in turn, `ROUNDS` times; writes seconds and processor seconds of each."""
    rank = int(os.environ["RANK"])
    device = place_process("cpu", rank, 2)
    dist.init_process_group("gloo")
    contenders: dict[str, Contender] = {f"pipeplan {s}": ours(s, rank, device) for s in OURS}
    contenders["torch Schedule1F1B"] = theirs(Schedule1F1B, rank, device)
    contenders["torch ScheduleGPipe"] = theirs(ScheduleGPipe, rank, device)
    contenders["two independent processes"] = alone(rank)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            before_s = time.process_time()
            seconds = run()
            found[name].append((seconds, time.process_time() - before_s))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps({"seconds": found, "peak_kib": peak}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
