"""The work of `benchmarks.faults`: a small model with dropout and batch norm, plans, and the command's arguments.

The blocks wait a little in their forward and backward, so that a rank is found at every kind of instruction.
"""

from math import lcm
from pathlib import Path

import torch
from torch import Tensor, nn

from planner_service.core.plan import Plan, Stage
from planner_service.core.profile import Model
from planner_service.core.schedule.program import pipelines_in_a_row
from planner_service.core.stage_costs import unit_costs
from worker_agent.models.presets import SleepBlock
from worker_agent.runtime.job import RunJob

WIDTH, FILLING = 8, 300_000
MODEL = "benchmarks.faults_work:blocks"
STEPS, CHECKPOINT_EVERY, SEED, MICROBATCH_SIZE = 15, 3, 5, 4

SCHEDULES = ("1f1b", "2bw", "pipedream, replicated", "interleaved", "2bp")
"""What is tried in turn."""


class Block(nn.Module):
    """(B, width) -> (B, width): linear, dropout and batch norm after a wait; frozen numbers make checkpoints longer."""

    def __init__(self) -> None:
        super().__init__()
        self.wait = SleepBlock(forward_s=0.002, backward_s=0.003, width=WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH))
        self.register_buffer("filling", torch.randn(FILLING))

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        return torch.as_tensor(self.layers(self.wait(x)))


def blocks() -> list[nn.Module]:
    """Four of them."""
    return [Block() for _ in range(4)]


def data_spec(out: Path) -> str:
    """The data of a run, whose reads are noted beside its folder."""
    return f"tests.worker.runtime.recorded:recorded?folder={reads_folder(out)}"


def reads_folder(out: Path) -> Path:
    """Where the processes of a run note what they read."""
    return out.with_name(out.name + "-reads")


def plan_for(name: str) -> Plan:
    """The plan that a schedule is tried with: two or three processes."""
    match name:
        case "1f1b":
            return _plan("1f1b", (0, 2, 4))
        case "2bw":
            return _plan("pipedream-2bw", (0, 1, 4), optimizer="adam")
        case "pipedream, replicated":
            return _plan("pipedream", (0, 3, 4), replicas=(2, 1), microbatches=1, optimizer="momentum")
        case "interleaved":
            return _plan("1f1b-interleaved", (0, 1, 2, 3, 4), chunks=2)
        case _:
            return _plan("1f1b", (0, 2, 4), split_backward=True, optimizer="adam")


def _plan(
    schedule: str,
    cuts: tuple[int, ...],
    *,
    replicas: tuple[int, ...] = (),
    microbatches: int = 4,
    optimizer: str = "sgd",
    split_backward: bool = False,
    chunks: int = 1,
) -> Plan:
    depth = len(cuts) - 1
    counts = replicas or (1,) * depth
    costs = unit_costs(forward_s=0.005, backward_input_s=0.005, backward_weight_s=0.005)
    return Plan(
        planner="benchmark",
        cost_model="unit",
        model=Model(name="faults", spec=MODEL),
        dtype="float32",
        profile_id="0" * 32,
        cluster_id="0" * 32,
        batch_size=MICROBATCH_SIZE * microbatches * lcm(*counts),
        stages=tuple(Stage(start=cuts[s], stop=cuts[s + 1], replicas=counts[s]) for s in range(depth)),
        costs=(costs,) * depth,
        placement=pipelines_in_a_row(counts[: depth // chunks]),
        schedule=schedule,
        microbatch_size=MICROBATCH_SIZE,
        microbatches=microbatches,
        optimizer=optimizer,
        memory_accounting="training",
        time_per_microbatch_s=1.0,
        throughput_samples_per_s=1.0,
        bubble_fraction=0.0,
        optimal_in_flight=depth,
        configurations_considered=1,
        split_backward=split_backward,
        chunks=chunks,
    )


def job_for(plan: Plan, out: Path) -> RunJob:
    """What the command makes of `arguments`: its program tells what every rank executes."""
    return RunJob(
        plan=plan,
        model=MODEL,
        data=data_spec(out),
        steps=STEPS,
        seed=SEED,
        checkpoint_every=CHECKPOINT_EVERY,
        out=str(out),
        device="cpu",
    )


def arguments(plan_file: Path, out: Path) -> list[str]:
    """Those of `pipeplan-agent run`."""
    given = {
        "--plan": plan_file,
        "--model": MODEL,
        "--data": data_spec(out),
        "--steps": STEPS,
        "--checkpoint-every": CHECKPOINT_EVERY,
        "--seed": SEED,
        "--device": "cpu",
        "--out": out,
    }
    return ["run", *(str(word) for pair in given.items() for word in pair)]
