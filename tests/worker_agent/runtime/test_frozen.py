"""Frozen parameters have no gradients and no optimizer states, are never exchanged, and are in the checkpoints."""

import errno
import os
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipeplan.documents.plan import Plan
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights, train
from tests.worker_agent.runtime.test_executor import CUTS, DATA, RATE, SEED, STEPS, checkpoint_weights, distance
from worker_agent.agent.limits import folder_bytes
from worker_agent.engine.optimizers import Optimizer
from worker_agent.engine.results import DivergedError
from worker_agent.engine.weights import Weights as StageWeights
from worker_agent.engine.weights import find_slots
from worker_agent.models.chain import build_model
from worker_agent.runtime import checkpoint
from worker_agent.runtime.checkpoint import Untrained, load_stage, newest_finite, save_stage
from worker_agent.runtime.export import export_checkpoint
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.manifest import Defect, Manifest, inspect

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


def test_checkpoints_store_frozen_weights_once_and_any_of_them_may_go(tmp_path: Path) -> None:
    plan = make_plan("pipedream-2bw", CUTS[2], optimizer="adam", dtype="float32")
    whole = execute(plan, tmp_path, checkpoint_every=1)
    folders = [tmp_path / "checkpoints" / f"step-{step}" for step in range(1, STEPS + 1)]
    for stage in (0, 1):
        files = [folder / f"stage-{stage}.frozen.safetensors" for folder in folders]
        assert len({file.stat().st_ino for file in files}) == 1
        assert set(load_file(files[0])) == {name for name in FROZEN if name.startswith(str(2 * stage))}
        assert not set(FROZEN) & set(load_file(folders[0] / f"stage-{stage}.safetensors"))
    assert folder_bytes(tmp_path / "checkpoints") < sum(folder_bytes(folder) for folder in folders)
    for folder in folders[2:]:
        rmtree(folder)
    rmtree(folders[0])
    resumed = execute(plan, tmp_path, first_step=2, checkpoint_every=1)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "exported", step=STEPS)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(whole[name], exported[name]) for name in whole)


def write(root: Path, step: int, layer: nn.Linear, *, apart: bool = True) -> Weights:
    """A checkpoint of a stage with a trained bias and a frozen weight; not `apart`, as earlier releases wrote it."""
    layer.weight.requires_grad_(False)
    names: dict[torch.Tensor, str] = {tensor: name for name, tensor in layer.named_parameters()}
    weights, others = StageWeights(find_slots([layer], names), Optimizer("sgd", 0.1)), Untrained([layer], names)
    frozen = others.frozen if apart else set()
    save_stage(root, manifest_of(step), stage=0, weights=weights, buffers=others, versions=[0], frozen=frozen)
    load_stage(root, step, stage=0, weights=weights, buffers=others)
    return {name: tensor.detach().clone() for name, tensor in layer.named_parameters()}


def manifest_of(step: int) -> Manifest:
    job = RunJob(plan=make_plan("naive", (0, 4)), model=MODEL, data=DATA, steps=9, out="unused", device="cpu")
    return job.manifest(step)


def test_frozen_weights_that_changed_are_stored_anew(tmp_path: Path) -> None:
    """A module may move frozen weights itself: the checkpoint has them as they are."""
    layer = nn.Linear(4, 4)
    files = [tmp_path / f"step-{step}" / "stage-0.frozen.safetensors" for step in (1, 2, 3)]
    write(tmp_path, 1, layer)
    layer.weight.data.mul_(2)  # which autograd does not count
    write(tmp_path, 2, layer)
    write(tmp_path, 3, layer)
    first, second, third = (load_file(file)["weight"] for file in files)
    assert torch.equal(2 * first, second) and torch.equal(third, layer.weight)
    assert files[0].stat().st_ino != files[1].stat().st_ino == files[2].stat().st_ino
    assert all(isinstance(inspect(tmp_path, step), Manifest) for step in (1, 2, 3))


def test_a_damaged_file_of_frozen_weights_is_noticed_and_never_shared(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    write(tmp_path, 1, layer)
    path = tmp_path / "step-1" / "stage-0.frozen.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    found = inspect(tmp_path, 1)
    assert isinstance(found, Defect) and "stage-0.frozen.safetensors has another checksum" in str(found)
    write(tmp_path, 2, layer)
    assert isinstance(inspect(tmp_path, 2), Manifest)
    path.unlink()
    assert "stage-0.frozen.safetensors is missing" in str(inspect(tmp_path, 1))


def test_a_file_system_without_hard_links_takes_a_file_for_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: object, target: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    layer = nn.Linear(4, 4)
    for step in (1, 2):
        write(tmp_path, step, layer)
    files = [tmp_path / f"step-{step}" / "stage-0.frozen.safetensors" for step in (1, 2)]
    assert files[0].read_bytes() == files[1].read_bytes() and len({file.stat().st_ino for file in files}) == 2


def test_a_checkpoint_of_an_earlier_release_has_them_among_the_others(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    written = write(tmp_path, 1, layer, apart=False)
    assert set(load_file(tmp_path / "step-1" / "stage-0.safetensors")) == {"weight", "bias"}
    assert isinstance(inspect(tmp_path, 1), Manifest)
    assert all(torch.equal(written[name], tensor) for name, tensor in layer.named_parameters())


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {"split_backward": True}),
        ("pipedream-2bw", {"replicas": 2}),
        ("gpipe", {"recompute": True}),
        ("1f1b", {"recompute": True, "recompute_unit": "block"}),
        ("1f1b-interleaved", {"chunks": 2, "replicas": 2}),
        ("zb-v", {"chunks": 2}),
        ("pipedream", {"microbatches": 1}),
    ],
)
@pytest.mark.parametrize("model", ["extractor?width=8&trained=1", "extractor?width=8&trained=6", "adapters?width=8"])
def test_stages_before_the_first_trained_block_run_no_backward(
    model: str, schedule: str, options: dict[str, Any], tmp_path: Path
) -> None:
    plan, spec = make_plan(schedule, (0, 2, 4, 6, 8), **options), f"tests.worker_agent.runtime.awkward:{model}"
    job = RunJob(
        plan=plan,
        model=spec,
        data=DATA,
        steps=2,
        checkpoint_every=2,
        seed=SEED,
        learning_rate=RATE,
        out=str(tmp_path),
        device="cpu",
    )
    run_ranks(job)
    reference = train(plan, spec, DATA, steps=2, seed=SEED, learning_rate=RATE)
    found = checkpoint_weights(tmp_path, 2)
    assert distance({name: found[name] for name in reference}, reference) < 1e-11


def test_frozen_weights_that_are_not_finite_are_never_saved_and_a_file_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of -inf may be a frozen weight, as it may be a buffer."""
    layer = nn.Linear(4, 4)
    layer.weight.data.fill_(-torch.inf).triu_(1)
    write(tmp_path, 1, layer)
    looked_at: list[str] = []
    monkeypatch.setattr(checkpoint, "not_finite", lambda tensors: looked_at.extend(tensors))
    write(tmp_path, 2, layer)
    assert newest_finite(tmp_path).manifest == inspect(tmp_path, 2) and set(looked_at) == {"bias"}
    monkeypatch.undo()
    layer.weight.data[0, 0] = torch.nan
    with pytest.raises(DivergedError, match="weight, which is frozen, is not finite after step 3"):
        write(tmp_path, 3, layer)
    assert (
        isinstance(inspect(tmp_path, 3), Defect) and not (tmp_path / "step-3" / "stage-0.frozen.safetensors").exists()
    )


def test_the_file_of_an_earlier_attempt_is_not_taken_for_weights_that_are_trained_now(tmp_path: Path) -> None:
    """A resumed run may write a checkpoint again. If its model freezes less, it leaves the other file there."""
    layer = nn.Linear(4, 4)
    write(tmp_path, 1, layer)
    layer.weight.data.mul_(2)
    written = write(tmp_path, 1, layer, apart=False)
    assert torch.equal(written["weight"], layer.weight)
    assert torch.equal(load_file(tmp_path / "step-1" / "stage-0.safetensors")["weight"], written["weight"])
    manifest = inspect(tmp_path, 1)
    assert isinstance(manifest, Manifest) and "stage-0.frozen.safetensors" not in manifest.files
