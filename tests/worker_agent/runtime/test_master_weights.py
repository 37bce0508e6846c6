"""16-bit models whose optimizer works on float32 copies: equal to one process to the last bit, resumed ones too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.builders import Cell, cluster, profile
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train
from tests.worker_agent.runtime.test_executor import DATA, MODEL, RATE, SEED, STEPS, checkpoint_weights
from worker_agent.engine.results import RankResult
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import build_loss
from worker_agent.runtime.job import RunJob

WIDTH = 8
WEIGHT_BYTES = (WIDTH * WIDTH + WIDTH) * torch.bfloat16.itemsize


def bfloat16_plan(schedule: str, optimizer: str, *, master_weights: bool = True) -> Plan:
    return make_plan(schedule, (0, 2, 4), optimizer=optimizer, dtype="bfloat16", master_weights=master_weights)


def job_of(plan: Plan, out: Path, *, first_step: int = 0, every: int = STEPS, steps: int = STEPS) -> RunJob:
    return RunJob(
        plan=plan,
        model=MODEL,
        data=DATA,
        steps=steps,
        first_step=first_step,
        seed=SEED,
        learning_rate=RATE,
        checkpoint_every=every,
        out=str(out),
        device="cpu",
    )


def execute(plan: Plan, out: Path, *, first_step: int = 0, every: int = STEPS) -> tuple[RankResult, ...]:
    return run_ranks(job_of(plan, out, first_step=first_step, every=every))


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.each_case
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_weights_equal_the_single_process_reference_to_the_last_bit(
    schedule: str, optimizer: str, tmp_path: Path
) -> None:
    plan = bfloat16_plan(schedule, optimizer)
    execute(plan, tmp_path)
    weights = checkpoint_weights(tmp_path, STEPS)
    expected = train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert equal(weights, expected)


def one_at_a_time(plan: Plan, *, kept: torch.dtype) -> Weights:
    """One step of plain SGD on float32 copies, with the sum of the microbatches' gradients kept in this type."""
    chain = build_model(MODEL, seed=SEED, dtype=torch.bfloat16)
    source = open_data(DATA, microbatch_size=plan.microbatch_size, seed=SEED)
    parameters = dict(chain.root.named_parameters())
    sums = {name: torch.zeros_like(p, dtype=kept) for name, p in parameters.items()}
    microbatches = plan.batch_size // plan.microbatch_size
    for k in range(microbatches):
        inputs, targets = (t.bfloat16() for t in source.microbatch(k))  # type: ignore[union-attr]
        loss = build_loss(None)(chain.root(inputs), targets)
        gradients = torch.autograd.grad(loss, list(parameters.values()), torch.full_like(loss, 1 / microbatches))
        for name, gradient in zip(parameters, gradients, strict=True):
            sums[name] += gradient
    return {name: (p.detach().float() - RATE * sums[name].float()).bfloat16() for name, p in parameters.items()}


@pytest.mark.each_case
@pytest.mark.parametrize("options", [{}, {"split_backward": True}, {"recompute": True}], ids=str)
def test_gradients_of_many_microbatches_add_up_in_float32(options: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan("1f1b", (0, 2, 4), microbatches=64, dtype="bfloat16", master_weights=True, **options)
    run_ranks(job_of(plan, tmp_path, steps=1, every=1))
    weights = checkpoint_weights(tmp_path, 1)
    assert equal(weights, one_at_a_time(plan, kept=torch.float32))
    assert not equal(weights, one_at_a_time(plan, kept=torch.bfloat16))


def test_without_master_weights_small_updates_are_lost(tmp_path: Path) -> None:
    plan = bfloat16_plan("1f1b", "adam", master_weights=False)
    execute(plan, tmp_path)
    with_masters = replace(plan, master_weights=True)
    expected = train(with_masters, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert not equal(checkpoint_weights(tmp_path, STEPS), expected)


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_a_resumed_run_ends_on_the_same_weights_masters_and_states(schedule: str, tmp_path: Path) -> None:
    plan = bfloat16_plan(schedule, "adam")
    execute(plan, tmp_path / "whole", every=1)
    execute(plan, tmp_path / "resumed", every=2)
    execute(plan, tmp_path / "resumed", first_step=2, every=1)
    ends = [tmp_path / name / "checkpoints" / f"step-{STEPS}" for name in ("whole", "resumed")]
    for file in ("stage-0.safetensors", "stage-1.safetensors", "stage-0.state", "stage-1.state"):
        whole, resumed = (load_file(end / file) for end in ends)
        assert equal(whole, resumed)
    states = {name: state for name, state in load_file(ends[0] / "stage-0.state").items() if "optimizer/" in name}
    assert {name.split("/")[1] for name in states} == {"master_weight", "exp_avg", "exp_avg_sq", "step"}
    assert {state.dtype for state in states.values()} == {torch.float32}


def two_linear_blocks_each() -> Profile:
    return replace(profile([Cell(weight_bytes=WEIGHT_BYTES)] * 4), dtype="bfloat16")


@pytest.mark.parametrize(("schedule", "bytes_a_parameter"), [("1f1b", 18), ("pipedream-2bw", 20)])
def test_mixed_precision_adam_holds_what_the_plan_says(schedule: str, bytes_a_parameter: int, tmp_path: Path) -> None:
    """2 for a version, 4 for its gradient, 4 for the master and 8 for Adam's moments; 2 more for a further version."""
    options = Options(schedule=schedule, stages=2, microbatch_size=1, optimizer="adam", recompute=False)
    problem = PlanningProblem(
        profile=two_linear_blocks_each(), cluster=cluster((2, 1.0)), batch_size=4, options=options
    )
    plan = solve("pipedream-2bw", problem)
    assert isinstance(plan, Plan)
    parameters = 2 * WEIGHT_BYTES // 2
    memory = plan.stages[0].memory
    assert memory is not None
    assert memory.total == plan.stages[0].memory_bytes == bytes_a_parameter * parameters
    assert (memory.gradients, memory.master_weights, memory.optimizer_states) == tuple(
        size * parameters for size in (4, 4, 8)
    )
    steps = 4 * 4  # Adam counts its steps in a float32 for each of the four tensors
    for result in execute(plan, tmp_path):
        lane = list(zip(result.lane.instructions, result.lane.memory_bytes, strict=True))
        last = {kind: max(i for i, (text, _) in enumerate(lane) if text.startswith(kind)) for kind in "BU"}
        assert lane[last["B"]][1] - steps == memory.total  # nothing is in flight any more
        assert lane[last["U"]][1] - steps == memory.total - memory.gradients
