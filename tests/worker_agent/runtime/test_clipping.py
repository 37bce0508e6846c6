"""Gradients are clipped by the norm of the whole model's: over all stages, each parameter once."""

from pathlib import Path
from typing import Any

import pytest

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from pipeplan.simulation.predict import predict
from tests.schedules import INTERLEAVED, chunks_of
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train
from tests.worker_agent.runtime.test_executor import (
    CUTS,
    DATA,
    MODEL,
    RATE,
    SEED,
    STEPS,
    checkpoint_weights,
    distance,
    without_checkpoints,
)
from worker_agent.engine.results import RankResult
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.run import execute

CLIP_NORM = 0.3
"""Below the norm of the first batches' gradients, above that of single stages."""


def job_of(plan: Plan, out: Path, **options: Any) -> RunJob:
    given: dict[str, Any] = {"steps": STEPS, "checkpoint_every": STEPS, "clip_norm": CLIP_NORM} | options
    return RunJob(plan=plan, model=MODEL, data=DATA, seed=SEED, learning_rate=RATE, out=str(out), device="cpu", **given)


def clipped(plan: Plan, out: Path, **options: Any) -> tuple[Weights, tuple[RankResult, ...]]:
    results = run_ranks(job_of(plan, out, **options))
    return checkpoint_weights(out, STEPS), results


def expected(plan: Plan, clip_norm: float | None = CLIP_NORM) -> Weights:
    return train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE, clip_norm=clip_norm)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "depth", "replicas", "optimizer"),
    [
        ("naive", 2, 1, "sgd"),
        ("gpipe", 2, 2, "momentum"),
        ("1f1b", 4, 1, "adam"),
        ("1f1b", 2, 2, "sgd"),
        ("pipedream-2bw", 4, 1, "sgd"),
        ("pipedream-2bw", 2, 2, "adam"),
        ("data-parallel", 1, 2, "sgd"),
        ("1f1b-interleaved", 4, 1, "adam"),
        ("1f1b-interleaved", 4, 2, "sgd"),
        ("zb-v", 4, 1, "momentum"),
        ("zb-v", 2, 2, "sgd"),
        ("v-half", 4, 2, "adam"),
        ("dual-pipe-v", 4, 1, "sgd"),
    ],
)
def test_clipped_runs_equal_the_single_process_reference(
    schedule: str, depth: int, replicas: int, optimizer: str, tmp_path: Path
) -> None:
    plan = make_plan(schedule, CUTS[depth], replicas=replicas, optimizer=optimizer, chunks=chunks_of(schedule))
    weights, _ = clipped(plan, tmp_path)
    assert distance(weights, expected(plan)) < 1e-11
    assert distance(weights, expected(plan, None)) > 1e-6


def test_the_clipped_gradient_is_the_same_with_a_split_backward(tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[4], split_backward=True)
    weights, _ = clipped(plan, tmp_path)
    assert distance(weights, expected(plan)) < 1e-11


def test_a_norm_that_is_never_reached_changes_nothing(tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[2])
    weights, _ = clipped(plan, tmp_path, clip_norm=1e6)
    assert distance(weights, expected(plan, None)) < 1e-12


def test_float32_copies_take_the_clipped_gradient(tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[2], optimizer="momentum", dtype="bfloat16", master_weights=True)
    weights, _ = clipped(plan, tmp_path)
    reference = expected(plan)
    assert all((weights[name] == reference[name]).all() for name in reference)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "end"),
    [("1f1b", "G1 N1 U1"), ("pipedream-2bw", "G1 N1 U1"), (INTERLEAVED, "G1 G1.1 N1 U1 U1.1")],
)
def test_the_norms_exchanges_are_those_that_the_simulator_plays(schedule: str, end: str, tmp_path: Path) -> None:
    chunks = chunks_of(schedule)
    plan = make_plan(schedule, CUTS[2 * chunks], replicas=2, chunks=chunks)
    job = job_of(plan, tmp_path)
    for result, lane in zip(
        run_ranks(job), predict(plan, batches=STEPS, among_stages=job.among_stages).lanes, strict=True
    ):
        assert without_checkpoints(result.lane) == lane.instructions
        assert end in " ".join(result.lane.instructions)


def test_pipedream_refuses_to_clip(tmp_path: Path) -> None:
    rule = "schedule: must update all stages with the same batch to clip or scale gradients or to share weights"
    with pytest.raises(InvalidInputError, match=rule):
        execute(job_of(make_plan("pipedream", CUTS[2], microbatches=1), tmp_path), lambda _: None)
