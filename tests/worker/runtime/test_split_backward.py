"""Runs with 2BP end on the weights of the fused single-process reference, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from planner_service.core.plan import Plan
from planner_service.core.predict import predict, program_of
from planner_service.core.schedule.instructions import BackwardWeight, Checkpoint
from tests.worker.runtime.plans import make_plan
from tests.worker.runtime.processes import run_ranks
from tests.worker.runtime.reference import OPTIMIZERS, Weights
from tests.worker.runtime.test_executor import CUTS, checkpoint_weights, distance, without_checkpoints
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import build_loss
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.results import RankResult
from worker_agent.runtime.stage import random_seed

MODEL = "tests.worker.runtime.awkward:awkward?width=8"
DATA = "worker_agent.models.presets:regression?width=8&samples=64"
STEPS, SEED, RATE = 4, 3, 0.2
SCHEDULES = {"naive": ("naive", 1), "gpipe": ("gpipe", 4), "1f1b-1": ("1f1b", 1), "1f1b-2": ("1f1b", 2)}
"""2BP's four: the schedule, and a batch's microbatches a stage (naive, and GPipe on 2 stages: in all)."""


def plan_of(name: str, depth: int, **options: Any) -> Plan:
    schedule, a_stage = SCHEDULES[name]
    microbatches = a_stage * depth if schedule == "1f1b" else a_stage
    return make_plan(schedule, CUTS[depth], microbatches=microbatches, split_backward=True, **options)


def execute(plan: Plan, out: Path, **options: Any) -> tuple[Weights, tuple[RankResult, ...]]:
    """The weights after the last step, and the ranks' results."""
    job = RunJob(
        plan=plan,
        model=MODEL,
        data=DATA,
        seed=SEED,
        learning_rate=RATE,
        out=str(out),
        device="cpu",
        **{"steps": STEPS, "checkpoint_every": STEPS} | options,
    )
    results = run_ranks(job)
    return checkpoint_weights(out, job.steps), results


def reference(plan: Plan) -> Weights:
    """Plain training, microbatch by microbatch and block by block, with autograd's own backward."""
    chain = build_model(MODEL, seed=SEED, dtype=torch.float64)
    chain.root.train()
    source = open_data(DATA, microbatch_size=plan.microbatch_size, seed=SEED)
    optimizer = OPTIMIZERS[plan.optimizer](list(chain.root.parameters()), RATE)
    batch = plan.batch_size // plan.microbatch_size
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(step * batch, (step + 1) * batch):
            inputs, targets = (t.double() for t in source.microbatch(k))  # type: ignore[union-attr]
            values: Any = (inputs,)
            for index, block in enumerate(chain.blocks):
                torch.manual_seed(random_seed(SEED, k + 1, index))
                result = block(*values)
                values = result if isinstance(result, tuple) else (result,)
            torch.autograd.backward(build_loss(None)(values[0], targets) / batch)
        optimizer.step()
    return {name: p.detach() for name, p in chain.root.named_parameters()}


@pytest.mark.parametrize("concatenate", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_weights_equal_the_fused_reference(
    name: str, depth: int, recompute: bool, concatenate: bool, tmp_path: Path
) -> None:
    plan = plan_of(name, depth, recompute=recompute)
    weights, _ = execute(plan, tmp_path, concatenate=concatenate)
    assert distance(weights, reference(plan)) < 1e-13


@pytest.mark.parametrize("name", SCHEDULES)
def test_weights_of_replicas_equal_the_fused_reference(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, 2, replicas=2, optimizer="adam")
    weights, _ = execute(plan, tmp_path)
    assert distance(weights, reference(plan)) < 1e-11


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_runtime_executes_exactly_the_split_streams_that_the_simulator_plays(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, 4)
    _, results = execute(plan, tmp_path, checkpoint_every=1)
    for result, lane in zip(results, predict(plan, batches=STEPS).lanes, strict=True):
        assert any(text.startswith("W") for text in lane.instructions)
        assert without_checkpoints(result.lane) == lane.instructions
