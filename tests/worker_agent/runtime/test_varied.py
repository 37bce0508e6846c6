"""What varies from microbatch to microbatch, and what most models do not do, is trained as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeplan.documents.plan import Plan
from tests.schedules import STASHING, chunks_of
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train
from tests.worker_agent.runtime.test_executor import CUTS, DATA, RATE, SEED, STEPS, checkpoint_weights, distance
from tests.worker_agent.runtime.varied import SHAPES
from worker_agent.models.chain import build_model
from worker_agent.runtime.job import RunJob

HERE = "tests.worker_agent.runtime.varied"
SCHEDULES = ["naive", "gpipe", "1f1b", "zb-h1", "zb-v", "pipedream-2bw", "pipedream"]


def execute(plan: Plan, out: Path, model: str, data: str = DATA, **options: Any) -> Weights:
    given: dict[str, Any] = {"steps": STEPS, "checkpoint_every": STEPS} | options
    job = RunJob(plan=plan, model=model, data=data, seed=SEED, learning_rate=RATE, out=str(out), device="cpu", **given)
    run_ranks(job)
    return checkpoint_weights(out, STEPS)


def trained(weights: Weights, model: str) -> Weights:
    """Without the buffers."""
    names = {name for name, _ in build_model(model, seed=SEED).root.named_parameters()}
    return {name: tensor for name, tensor in weights.items() if name in names}


def expected(plan: Plan, model: str, data: str = DATA, **options: Any) -> Weights:
    return train(plan, model, data, steps=STEPS, seed=SEED, learning_rate=RATE, **options)


def planned(schedule: str, depth: int = 4, **options: Any) -> Plan:
    microbatches = 1 if schedule in STASHING else 4
    return make_plan(schedule, CUTS[depth], microbatches=microbatches, chunks=chunks_of(schedule), **options)


@pytest.mark.each_case
@pytest.mark.parametrize("kind", ["plain", "conjugate", "negative", "transposed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_complex_tensors_and_lazy_views_cross_a_cut_with_their_gradients(
    schedule: str, kind: str, tmp_path: Path
) -> None:
    """The first stage once got no gradient at all, and what a lazy view looked at was sent in its place."""
    model = f"{HERE}:spectra?kind={kind}"
    plan = planned(schedule, recompute=schedule == "gpipe")
    weights, reference = execute(plan, tmp_path, model), expected(plan, model)
    assert distance(weights, reference) < 1e-12
    start = build_model(model, seed=SEED, dtype=torch.float64).root.state_dict()
    assert all(float((weights[name] - start[name]).abs().max()) > 1e-6 for name in weights)


@pytest.mark.each_case
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_of_other_shapes_train_to_the_same(schedule: str, kind: str, frozen: bool, tmp_path: Path) -> None:
    """Into what the first message needed once went all others: shorter ones read what was there before."""
    model, data = f"{HERE}:over_positions?frozen={str(frozen).lower()}", f"{HERE}:shaped?kind={kind.replace(' ', '_')}"
    plan = planned(schedule, split_backward=schedule == "1f1b", recompute=schedule == "gpipe")
    assert distance(execute(plan, tmp_path, model, data), expected(plan, model, data)) < 1e-12


@pytest.mark.each_case
@pytest.mark.parametrize("kind", ["shorter and shorter", "longer and longer"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream-2bw"])
def test_messages_may_hold_another_number_of_tensors(schedule: str, kind: str, tmp_path: Path) -> None:
    model, data = f"{HERE}:changing_count", f"{HERE}:shaped?kind={kind.replace(' ', '_')}"
    apart = execute(make_plan(schedule, (0, 1, 2)), tmp_path / "two", model, data)
    together = execute(make_plan(schedule, (0, 2)), tmp_path / "one", model, data)
    assert distance(apart, together) < 1e-12


def test_modules_stay_in_the_mode_that_their_maker_chose(tmp_path: Path) -> None:
    """Batch norm that was frozen once normalised by the batch, drop-out that was off dropped."""
    model = f"{HERE}:modes"
    plan = planned("1f1b", 2)
    weights = execute(plan, tmp_path, model)
    assert distance(trained(weights, model), expected(plan, model)) < 1e-12
    assert torch.equal(weights["1.1.running_mean"], torch.linspace(-1.0, 1.0, 8).double())


@pytest.mark.each_case
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_what_no_microbatch_uses_is_left_alone_at_every_width(
    width: int, split_backward: bool, clip_norm: float | None, optimizer: str, tmp_path: Path
) -> None:
    """With replicas, or a norm to clip, it once got a gradient of zeros: AdamW decayed it, momentum moved it."""
    model = f"{HERE}:choosing"
    plan = make_plan("1f1b", CUTS[2], replicas=width, optimizer=optimizer, split_backward=split_backward)
    weights = execute(plan, tmp_path, model, clip_norm=clip_norm)
    assert distance(weights, expected(plan, model, clip_norm=clip_norm)) < 1e-11
    assert all(torch.equal(weights[f"{i}.idle"], torch.ones(8).double()) for i in range(4))


@pytest.mark.each_case
@pytest.mark.parametrize("width", [1, 2])
def test_what_no_stage_uses_of_what_they_share_is_left_alone(width: int, tmp_path: Path) -> None:
    plan = make_plan("1f1b", CUTS[2], replicas=width, optimizer="adamw")
    weights = execute(plan, tmp_path, f"{HERE}:tied_and_idle")
    assert torch.equal(weights["0.idle"], torch.ones(8).double())


@pytest.mark.each_case
@pytest.mark.parametrize("model", ["spectral", "moving?way=in_place", "moving?way=uncounted", "moving?way=replaced"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream-2bw", "pipedream"])
def test_a_forward_that_changes_buffers_is_recomputed_with_what_they_were(
    schedule: str, model: str, tmp_path: Path
) -> None:
    """It once ran again on the buffers of the day: off by 5e-6 with spectral norm under 2BW."""
    kept = execute(planned(schedule), tmp_path / "kept", f"{HERE}:{model}")
    recomputed = execute(planned(schedule, recompute=True), tmp_path / "recomputed", f"{HERE}:{model}")
    assert distance(kept, recomputed) < 1e-13


@pytest.mark.each_case
@pytest.mark.parametrize("way", ["in_place", "uncounted", "replaced"])
def test_a_checkpoint_holds_the_buffers_that_modules_have_put_in_place_of_others(way: str, tmp_path: Path) -> None:
    model, plan = f"{HERE}:moving?way={way}", make_plan("1f1b", CUTS[2])
    whole = execute(plan, tmp_path, model, checkpoint_every=2)
    early = load_file(tmp_path / "checkpoints" / "step-2" / "stage-0.safetensors")
    assert not torch.equal(early["0.mean"], torch.ones(8).double())
    assert distance(execute(plan, tmp_path, model, first_step=2), whole) == 0.0


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1f1b", {}), ("1f1b", {"replicas": 2}), ("1f1b", {"recompute": True}), ("gpipe", {}), ("zb-v", {})],
)
def test_recurrent_networks_and_weights_that_are_computed_train_to_the_same_with_2bp(
    schedule: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = f"{HERE}:recurrent"
    depth = 4 if schedule == "zb-v" else 2
    plan = planned(schedule, depth, split_backward=schedule != "zb-v", **options)
    assert distance(trained(execute(plan, tmp_path, model), model), expected(plan, model)) < 1e-12
