"""The work of `benchmarks.faults`: a small model with dropout and batch norm, plans, and the command's arguments.

The blocks wait a little in their forward and backward, so that a rank is found at every kind of instruction.
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeplan.documents.plan import Plan
from tests.worker_agent.runtime.plans import make_plan
from worker_agent.models.presets import SleepBlock
from worker_agent.runtime.job import RunJob

WIDTH, FILLING = 8, 300_000
MODEL = "benchmarks.faults_work:blocks"
STEPS, CHECKPOINT_EVERY, SEED, MICROBATCH_SIZE = 15, 3, 5, 4

SCHEDULES = ("1f1b", "2bw", "pipedream, replicated", "interleaved", "2bp")
"""The schedules, tried in turn."""


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
    """Four blocks."""
    return [Block() for _ in range(4)]


def data_spec(out: Path) -> str:
    """The data of a run, whose reads are recorded beside its folder."""
    return f"tests.worker_agent.runtime.recorded:recorded?folder={reads_folder(out)}"


def reads_folder(out: Path) -> Path:
    """The file in which the processes of a run record their reads."""
    return out.with_name(out.name + "-reads")


def plan_for(name: str) -> Plan:
    """The plan with which a schedule is tried: two or three processes."""
    plan = partial(make_plan, microbatch_size=MICROBATCH_SIZE, dtype="float32", unit_s=0.005, spec=MODEL)
    match name:
        case "1f1b":
            return plan("1f1b", (0, 2, 4))
        case "2bw":
            return plan("pipedream-2bw", (0, 1, 4), optimizer="adam")
        case "pipedream, replicated":
            return plan("pipedream", (0, 3, 4), replicas=(2, 1), microbatches=1, optimizer="momentum")
        case "interleaved":
            return plan("1f1b-interleaved", (0, 1, 2, 3, 4), chunks=2)
        case _:
            return plan("1f1b", (0, 2, 4), split_backward=True, optimizer="adam")


def job_for(plan: Plan, out: Path) -> RunJob:
    """The command's job from `arguments`, with every rank's program."""
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
