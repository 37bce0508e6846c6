"""Frozen parameters have no gradients and no optimizer states, are never exchanged, and are in the checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeplan.documents.plan import Plan
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train
from tests.worker_agent.runtime.test_executor import CUTS, DATA, RATE, SEED, STEPS, checkpoint_weights, distance
from worker_agent.models.chain import build_model
from worker_agent.runtime.job import RunJob

MODEL = "tests.worker_agent.runtime.awkward:frozen?width=8"
FROZEN = ("0.0.weight", "0.0.bias", "2.0.weight")


def execute(plan: Plan, out: Path, **options: Any) -> Weights:
    given: dict[str, Any] = {"steps": STEPS, "checkpoint_every": STEPS} | options
    job = RunJob(plan=plan, model=MODEL, data=DATA, seed=SEED, learning_rate=RATE, out=str(out), device="cpu", **given)
    run_ranks(job)
    return checkpoint_weights(out, STEPS)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "depth", "options"),
    [
        ("gpipe", 2, {"recompute": True}),
        ("1f1b", 4, {"optimizer": "adamw"}),
        ("1f1b", 2, {"replicas": 2, "split_backward": True}),
        ("pipedream-2bw", 4, {"optimizer": "momentum"}),
        ("pipedream", 2, {"microbatches": 1}),
    ],
)
def test_a_run_with_frozen_weights_equals_the_single_process_reference(
    schedule: str, depth: int, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = make_plan(schedule, CUTS[depth], **options)
    weights = execute(plan, tmp_path, clip_norm=None if schedule == "pipedream" else 0.3)
    clip_norm = None if schedule == "pipedream" else 0.3
    reference = train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE, clip_norm=clip_norm)
    assert distance(weights, reference) < 1e-11
    start = build_model(MODEL, seed=SEED, dtype=torch.float64).root.state_dict()
    assert all(torch.equal(weights[name], start[name]) for name in FROZEN)
    assert not torch.equal(weights["2.0.bias"], start["2.0.bias"])


def test_they_have_no_optimizer_states_and_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[2], optimizer="adam")
    whole = execute(plan, tmp_path, checkpoint_every=2)
    folder = tmp_path / "checkpoints" / "step-2"
    states = {name for file in folder.glob("*.state") for name in load_file(file)}
    assert states and not any(name.endswith(FROZEN) for name in states)
    resumed = execute(plan, tmp_path, first_step=2)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
