"""The learning rate is a function of the step, on every stage and after every resumption."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from tests.worker_agent.commands import finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train
from tests.worker_agent.runtime.test_executor import CUTS, DATA, MODEL, RATE, SEED, checkpoint_weights, distance
from tests.worker_agent.runtime.test_run_command import command
from worker_agent.runtime.job import RunJob

STEPS = 6


def job_of(plan: Plan, out: Path, **options: Any) -> RunJob:
    given: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 2, "lr_schedule": "cosine", "warmup_steps": 2}
    return RunJob(
        plan=plan, model=MODEL, data=DATA, seed=SEED, learning_rate=RATE, out=str(out), device="cpu", **given | options
    )


def execute(job: RunJob) -> Weights:
    run_ranks(job)
    return checkpoint_weights(Path(job.out), job.steps)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, 1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0]),
    ],
)
def test_the_rate_rises_in_the_warm_up_and_decays_to_nothing_at_the_end(
    schedule: str, shares: list[float], tmp_path: Path
) -> None:
    job = job_of(make_plan("1f1b", CUTS[2]), tmp_path, lr_schedule=schedule)
    assert [job.learning_rate_at(step) / RATE for step in range(STEPS + 1)] == pytest.approx(shares)
    assert job.learning_rate_at(STEPS + 10) == job.learning_rate_at(STEPS)


def test_torchs_own_schedule_gives_the_same_cosine(tmp_path: Path) -> None:
    job = job_of(make_plan("1f1b", CUTS[2]), tmp_path, warmup_steps=0)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    for step in range(STEPS):
        assert job.learning_rate_at(step) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "optimizer", "replicas"),
    [("1f1b", "adam", 1), ("pipedream-2bw", "momentum", 1), ("pipedream", "sgd", 1), ("gpipe", "adamw", 2)],
)
def test_every_update_takes_the_rate_of_its_step(schedule: str, optimizer: str, replicas: int, tmp_path: Path) -> None:
    microbatches = 1 if schedule == "pipedream" else 4
    plan = make_plan(schedule, CUTS[2], microbatches=microbatches, optimizer=optimizer, replicas=replicas)
    job = job_of(plan, tmp_path)
    reference: dict[str, Any] = {"steps": STEPS, "seed": SEED, "learning_rate": RATE}
    weights = execute(job)
    assert distance(weights, train(plan, MODEL, DATA, **reference, rate_of=job.learning_rate_at)) < 1e-11
    assert distance(weights, train(plan, MODEL, DATA, **reference)) > 1e-4


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_resumed_run_goes_on_with_the_rate_that_it_would_have_had(schedule: str, tmp_path: Path) -> None:
    plan = make_plan(schedule, CUTS[2], microbatches=1 if schedule == "pipedream" else 4, optimizer="momentum")
    whole = execute(job_of(plan, tmp_path / "whole"))
    execute(job_of(plan, tmp_path / "parts", steps=4, decay_steps=STEPS))
    parts = execute(job_of(plan, tmp_path / "parts", first_step=4))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.campaign
def test_the_commands_options_reach_the_ranks(tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[2], dtype="float32", optimizer="momentum")
    given = [
        "--lr",
        "0.2",
        "--lr-schedule",
        "linear",
        "--warmup-steps",
        "2",
        "--decay-steps",
        "5",
        "--clip-norm",
        "0.3",
    ]
    result = finish(command(plan, tmp_path, *given, "--autocast", "bfloat16", "--loss-scale", "64", steps=STEPS))
    assert result.returncode == 0, result.stderr
    job = job_of(plan, tmp_path, lr_schedule="linear", decay_steps=5)
    options: dict[str, Any] = {"rate_of": job.learning_rate_at, "clip_norm": 0.3, "autocast": torch.bfloat16}
    reference = train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE, **options)
    assert distance(checkpoint_weights(tmp_path / "out", STEPS), reference) < 1e-6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr_schedule": "step"}, "lr_schedule: must be one of constant, linear, cosine, got 'step'"),
        ({"warmup_steps": -1}, "warmup_steps: must be a whole number of at least 0"),
        ({"decay_steps": 0}, "decay_steps: must be a whole number of at least 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        job_of(make_plan("1f1b", CUTS[2]), tmp_path, **options)
