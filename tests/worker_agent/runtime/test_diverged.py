"""Weights and states that are not finite are never sealed; a run that ends on them names the last good checkpoint."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeplan.errors import InvalidInputError
from tests.worker_agent.commands import finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.test_checkpoint import job_in, save, stage_weights, write
from tests.worker_agent.runtime.test_run_command import MLP, command, steps_of
from worker_agent.engine.results import DivergedError
from worker_agent.runtime.checkpoint import Untrained, newest_finite, not_finite, save_stage
from worker_agent.runtime.export import chosen_manifest
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.manifest import newest, seal, stage_files, step_directory
from worker_agent.runtime.resume import resumed

FAULTY = "tests.worker_agent.runtime.faulty:overflowing"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, value: float) -> None:
    good = {"a": torch.full((3, 5), 6e4, dtype=dtype), "b": torch.zeros((), dtype=dtype), "c": torch.empty(0)}
    assert not_finite(good | {"whole": torch.tensor([1])}) is None
    bad = torch.zeros(7, 3, dtype=dtype)
    bad[4, 1] = value
    assert not_finite({**good, "bad": bad}) == "bad"


@pytest.mark.parametrize("where", ["weight", "state", "version"])
def test_what_is_not_finite_is_not_written(where: str, tmp_path: Path) -> None:
    job, weights, versions = job_in(tmp_path), stage_weights(1), [1]
    write(job, 3)
    save(job, 6, 1)
    if where == "weight":
        weights.slots[0].parameter.data[0, 0] = torch.nan
    elif where == "state":
        weights.optimizer.states[1]["momentum_buffer"][0] = torch.inf
    else:
        weights.load_version(0, {name: torch.full_like(t, torch.nan) for name, t in weights.version_tensors(1).items()})
        versions = [0, 1]
    with pytest.raises(DivergedError, match="is not finite after step 6: try a lower learning rate"):
        save_stage(job.directory.checkpoints, job.manifest(6), stage=0, weights=weights, buffers={}, versions=versions)
    assert resumed(job).first_step == 3
    assert not list(step_directory(job.directory.checkpoints, 6).glob("stage-0*"))


class Watching(nn.Module):
    """Its statistics are a buffer; others hold a mask, bounds with infinite ends, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.zeros(4))
        self.register_buffer("bounds", torch.tensor([-torch.inf, 0.0, 1.0, torch.inf]))
        self.register_buffer("turns", torch.ones(4, dtype=torch.complex64))


@pytest.mark.parametrize(("name", "value"), [("mean", torch.nan), ("mean", torch.inf), ("turns", torch.nan)])
def test_a_buffer_that_is_no_longer_finite_is_not_written(name: str, value: float, tmp_path: Path) -> None:
    job, weights, module = job_in(tmp_path), stage_weights(1), Watching()
    buffers = Untrained([module], {tensor: name for name, tensor in module.named_buffers()})
    assert buffers.infinite == {"bounds"}
    module.get_buffer("mask")[1:] = -torch.inf
    saved = partial(save_stage, stage=0, weights=weights, versions=[1], buffers=buffers, infinite=buffers.infinite)
    saved(job.directory.checkpoints, job.manifest(3))
    module.get_buffer(name)[2] = value
    with pytest.raises(DivergedError, match=f"{name} is not finite after step 6: try a lower learning rate"):
        saved(job.directory.checkpoints, job.manifest(6))
    assert not list(step_directory(job.directory.checkpoints, 6).glob("stage-0*"))


def sealed_with(job: RunJob, step: int, tensor: torch.Tensor) -> None:
    """A whole checkpoint as an earlier release wrote it, with this tensor among the weights of both stages."""
    directory = step_directory(job.directory.checkpoints, step)
    directory.mkdir(parents=True)
    for stage in (0, 1):
        for name in stage_files(stage):
            save_file({"tensor": tensor}, directory / name)
        seal(directory, job.manifest(step), stage)


def test_a_checkpoint_of_an_earlier_release_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    job, told = job_in(tmp_path), list[str]()
    write(job, 3)
    sealed_with(job, 6, torch.tensor([0.0, torch.nan]))
    found = newest(job.directory.checkpoints).manifest
    assert found is not None and found.step == 6, "its files are whole"
    assert resumed(job, tell=told.append).first_step == 3
    assert told[0] == "step-6 holds tensor, which is not finite: going on from step-3"
    assert chosen_manifest(job.directory.checkpoints, None).step == 3
    with pytest.raises(InvalidInputError, match="step: must be a whole checkpoint: step-6 holds tensor, which is not"):
        chosen_manifest(job.directory.checkpoints, 6)


def test_a_mask_of_an_earlier_release_is_no_reason_to_pass_a_checkpoint_over(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    sealed_with(job, 6, torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf))
    found = newest_finite(job.directory.checkpoints).manifest
    assert found is not None and found.step == 6


@pytest.mark.each_case
@pytest.mark.parametrize(("schedule", "block"), [("1f1b", 0), ("pipedream-2bw", 3), ("gpipe", 1)])
def test_a_run_with_an_infinite_gradient_names_the_last_good_checkpoint_and_goes_on_from_it(
    schedule: str, block: int, tmp_path: Path
) -> None:
    plan, out = make_plan(schedule, (0, 2, 4), optimizer="adam"), tmp_path / "out"
    arguments = command(plan, tmp_path, "--checkpoint-every", "2", model=f"{FAULTY}?step=4&block={block}", steps=8)
    ended = finish([*arguments, "--max-restarts", "3"])
    assert ended.returncode == 1
    *_, last = ended.stderr.splitlines()
    assert last.endswith("the last good checkpoint is step-2: --resume goes on from it (--change learning-rate)")
    assert "starting again" not in ended.stderr, "it would come to the same"
    report = json.loads((out / "run.json").read_text())
    assert (report["state"], report["checkpoint"], report["step"] in (3, 4)) == ("failed", 2, True)
    assert report["error"] in last
    assert steps_of(out) == list(range(1, report["step"] + 1))
    assert newest(out / "checkpoints").manifest == newest(out / "checkpoints", before=3).manifest
    words = command(plan, tmp_path, "--resume", "--json", model=f"{FAULTY}?step=4&block={block}", steps=5)
    again = finish(words)  # whose process is at its third step then, and overflows in its fourth
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["first_step"] == 2


def test_a_run_that_diverges_before_any_checkpoint_says_so(tmp_path: Path) -> None:
    plan = make_plan("1f1b", (0, 2, 4), optimizer="adam")
    ended = finish(command(plan, tmp_path, model=f"{FAULTY}?step=2", steps=8))
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("; there is no checkpoint before it")
    again = finish(command(plan, tmp_path, "--resume", model=MLP, steps=8))
    assert again.returncode == 0, again.stderr
