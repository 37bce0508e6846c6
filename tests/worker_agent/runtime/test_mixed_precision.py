"""Autocast, and float16 with a loss scale on which all ranks agree: equal to torch's own in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError, RunFailedError
from pipeplan.schedules.registry import schedule_named
from tests.schedules import chunks_of
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train
from tests.worker_agent.runtime.test_executor import CUTS, DATA, MODEL, RATE, SEED, STEPS, checkpoint_weights, distance
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.runtime.job import GROWTH_STEPS, LossScale, RunJob
from worker_agent.runtime.run import execute as run_job

LOUD = "tests.worker_agent.runtime.awkward:loud?width=8"
CASTING = "tests.worker_agent.runtime.awkward:casting?width=8"
OVERFLOWS = 2.0**21
"""A loss scale with which the first updates overflow in float16."""


def job_of(plan: Plan, out: Path, **options: Any) -> RunJob:
    given: dict[str, Any] = {"model": MODEL, "steps": STEPS, "checkpoint_every": STEPS} | options
    return RunJob(plan=plan, data=DATA, seed=SEED, learning_rate=RATE, out=str(out), device="cpu", **given)


def execute(plan: Plan, out: Path, **options: Any) -> Weights:
    run_ranks(job_of(plan, out, **options))
    return checkpoint_weights(out, STEPS)


def plan_of(schedule: str, depth: int, **options: Any) -> Plan:
    microbatches = 1 if schedule == "pipedream" else 4
    chunks = chunks_of(schedule)
    return make_plan(schedule, CUTS[depth], dtype="float32", microbatches=microbatches, chunks=chunks, **options)


def expected(plan: Plan, **options: Any) -> Weights:
    return train(plan, MODEL, DATA, steps=STEPS, seed=SEED, learning_rate=RATE, **options)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "depth", "options"),
    [
        ("1f1b", 4, {}),
        ("gpipe", 2, {"recompute": True}),
        ("1f1b", 2, {"split_backward": True, "optimizer": "momentum"}),
        ("gpipe", 2, {"split_backward": True, "recompute": True, "replicas": 2}),
        ("zb-h1", 4, {}),
        ("zb-v", 4, {}),
        ("pipedream-2bw", 2, {"replicas": 2}),
        ("pipedream", 2, {}),
    ],
)
def test_bfloat16_autocast_equals_torchs_own_in_one_process(
    schedule: str, depth: int, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_of(schedule, depth, **options)
    results = run_ranks(job_of(plan, tmp_path, autocast="bfloat16"))
    weights = checkpoint_weights(tmp_path, STEPS)
    splits = plan.split_backward or schedule_named(schedule).splits_backward
    assert all(bool(result.deferred_share) is splits for result in results)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert distance(weights, expected(plan, autocast=torch.bfloat16)) < 1e-6
    assert distance(weights, expected(plan)) > 1e-5


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_blocks_that_autocast_by_themselves_see_every_update(schedule: str, tmp_path: Path) -> None:
    plan = plan_of(schedule, 2)
    run_ranks(job_of(plan, tmp_path, model=CASTING))
    wanted = train(plan, CASTING, DATA, steps=STEPS, seed=SEED, learning_rate=RATE)
    assert distance(checkpoint_weights(tmp_path, STEPS), wanted) < 1e-6


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "depth", "options"),
    [
        ("1f1b", 4, {}),
        ("gpipe", 2, {"replicas": 2}),
        ("pipedream-2bw", 4, {"optimizer": "momentum"}),
        ("1f1b-interleaved", 4, {"replicas": 2}),
        ("zb-v", 4, {}),
        ("v-half", 4, {"optimizer": "momentum"}),
        ("dual-pipe-v", 4, {"recompute": True}),
    ],
)
def test_float16_leaves_out_overflown_updates_like_torchs_scaler(
    schedule: str, depth: int, options: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_of(schedule, depth, **options)
    float16: dict[str, Any] = {"loss_scale": OVERFLOWS, "clip_norm": 0.3}
    weights = execute(plan, tmp_path, autocast="float16", **float16)
    float16["loss_scale"] *= plan.replicas[0]  # one process takes the mean over all replicas at once
    assert distance(weights, expected(plan, autocast=torch.float16, **float16)) < 1e-6
    scales = {float(load_file(file)["loss_scale/scale"]) for file in tmp_path.rglob("*.state")}
    assert len(scales) == 1
    left_out = torch.log2(torch.tensor(OVERFLOWS / scales.pop())).item()
    assert left_out == 2


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_an_update_that_overflows_on_one_stage_is_left_out_on_all(schedule: str, tmp_path: Path) -> None:
    root = build_model(LOUD, seed=SEED).root
    inputs, targets = open_data(DATA, microbatch_size=2, seed=SEED).microbatch(0)
    with torch.autocast("cpu", torch.float16):
        loss = torch.nn.functional.mse_loss(root(inputs), targets)  # type: ignore[arg-type]
    torch.autograd.backward(4096.0 * loss)
    overflown = {name for name, p in root.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    assert overflown == {"1.linear.weight"}
    plan = plan_of(schedule, 4)
    given: dict[str, Any] = {"model": LOUD, "autocast": "float16", "steps": 1, "checkpoint_every": 1}
    for name, scale, changes in (("loud", 4.0 * 4096.0, False), ("quiet", 1.0, True)):
        run_ranks(job_of(plan, tmp_path / name, loss_scale=scale, **given))
        weights = checkpoint_weights(tmp_path / name, 1)
        assert all(torch.equal(weights[n], p) is not changes for n, p in root.state_dict().items())


@pytest.mark.each_case
@pytest.mark.parametrize("schedule", ["pipedream-2bw", "v-half"])
def test_the_loss_scale_goes_on_where_it_was(schedule: str, tmp_path: Path) -> None:
    plan = plan_of(schedule, 2, optimizer="adam")
    float16: dict[str, Any] = {"autocast": "float16", "loss_scale": OVERFLOWS}
    whole = execute(plan, tmp_path, checkpoint_every=2, **float16)
    resumed = execute(plan, tmp_path, first_step=2, **float16)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_a_plan_that_was_profiled_under_autocast_runs_under_it(autocast: str, tmp_path: Path) -> None:
    plan = plan_of("1f1b", 2)
    asked = execute(plan, tmp_path / "asked", autocast=autocast)
    planned = execute(replace(plan, autocast=autocast), tmp_path / "planned")
    assert all(torch.equal(asked[name], planned[name]) for name in asked)
    assert job_of(replace(plan, autocast="float16"), tmp_path).first_loss_scale == 65536.0


def test_a_plan_that_was_profiled_under_autocast_runs_under_no_other(tmp_path: Path) -> None:
    plan = replace(plan_of("1f1b", 2), autocast="bfloat16")
    assert job_of(plan, tmp_path, autocast="bfloat16").computes_in == "bfloat16"
    with pytest.raises(InvalidInputError, match="autocast: must be the plan's, bfloat16, or be left out"):
        job_of(plan, tmp_path, autocast="float16")


def test_a_scale_grows_after_many_good_updates_and_shrinks_at_once() -> None:
    scale, theirs = LossScale(2.0**16), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for _ in range(GROWTH_STEPS - 1):
        scale.grow()
    assert scale.scale == theirs.get_scale() and theirs.get_growth_interval() == GROWTH_STEPS
    scale.grow()
    assert scale.scale == 2.0**17
    scale.shrink()
    assert scale.scale == 2.0**16
    with pytest.raises(RunFailedError, match="gradients overflow with a loss scale of"):
        for _ in range(100):
            scale.shrink()


def test_16_bit_weights_take_a_loss_scale_as_well(tmp_path: Path) -> None:
    """Powers of two change nothing as long as nothing over- or underflows."""
    plan = make_plan("1f1b", CUTS[2], dtype="bfloat16", master_weights=True)
    scaled = execute(plan, tmp_path / "scaled", loss_scale=1024.0)
    plain = execute(plan, tmp_path / "plain")
    assert all(torch.equal(scaled[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("schedule", "dtype", "options", "sentence"),
    [
        ("1f1b", "float64", {"autocast": "bfloat16"}, "autocast: must be left out for a plan in float64"),
        ("1f1b", "float32", {"autocast": "float32"}, "autocast: must be one of bfloat16, float16"),
        ("1f1b", "float32", {"loss_scale": 0.0}, "loss_scale: must be a finite number above 0"),
        ("pipedream", "float32", {"autocast": "float16"}, "schedule: must update all stages with the same batch"),
    ],
)
def test_what_cannot_be_is_refused(
    schedule: str, dtype: str, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    plan = make_plan(schedule, CUTS[2], dtype=dtype, microbatches=1)
    with pytest.raises(InvalidInputError, match=sentence):
        run_job(job_of(plan, tmp_path, **options), lambda _: None)
