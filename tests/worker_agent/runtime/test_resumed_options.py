"""A resumed run is trained as its folder says. What differs is refused by name, or changed and recorded."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeplan.errors import InvalidInputError
from pipeplan.protocol.training import OptionChange
from tests.worker_agent.commands import finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.test_checkpoint import write
from tests.worker_agent.runtime.test_executor import checkpoint_weights
from tests.worker_agent.runtime.test_run_command import DATA, MLP, command
from worker_agent.runtime.job import RunJob, write_job
from worker_agent.runtime.resume import CHANGEABLE, option_values, resumed
from worker_agent.runtime.run import _write_state

PLAN = make_plan("1f1b", (0, 2, 4), optimizer="momentum", dtype="float32")
L1 = "torch.nn.functional:l1_loss"
OTHERS: dict[str, Any] = {
    "loss": L1,
    "learning_rate": 0.02,
    "lr_schedule": "linear",
    "warmup_steps": 2,
    "decay_steps": 40,
    "clip_norm": 0.5,
    "batch_norm": "minibatch",
    "autocast": "bfloat16",
    "loss_scale": 8.0,
    "concatenate": True,
}
"""For each option but the optimizer a value that is not its default."""


def job_in(out: Path, **options: Any) -> RunJob:
    given: dict[str, Any] = {"plan": PLAN, "steps": 9, "checkpoint_every": 3} | options
    return RunJob(out=str(out), model=MLP, data=DATA, device="cpu", **given)


def begun(out: Path, **options: Any) -> RunJob:
    """A run's folder, with checkpoints after 3 and 6 of 9 steps."""
    job = job_in(out, **options)
    out.mkdir(exist_ok=True)
    write_job(job)
    write(job, 3, 6)
    return job


def going_on(out: Path, *, given: Collection[str] = (), changed: Collection[str] = (), **options: Any) -> RunJob:
    return resumed(job_in(out, **options), given=given, changed=changed)


def test_every_option_has_a_case() -> None:
    assert {"optimizer", *OTHERS} == {*CHANGEABLE}


def test_all_options_come_from_the_folder(tmp_path: Path) -> None:
    job = begun(tmp_path, **OTHERS, seed=5, plan=replace(PLAN, optimizer="adam"))
    again = going_on(tmp_path, steps=12)
    assert option_values(again) == option_values(job)
    assert (again.first_step, again.steps, again.changes) == (6, 12, ())


def test_all_options_come_from_the_report_where_the_job_is_lost(tmp_path: Path) -> None:
    change = OptionChange(step=3, option="clip_norm", old="null", new="0.5")
    plan = replace(PLAN, optimizer="adam")
    job = replace(begun(tmp_path, **OTHERS | {"decay_steps": None}, seed=5, plan=plan), changes=(change,))
    _write_state(job, "interrupted")
    job.directory.job.unlink()
    again = going_on(tmp_path, steps=9)
    assert option_values(again) == option_values(job)
    assert (again.first_step, again.changes) == (6, (change,))
    with pytest.raises(InvalidInputError, match=r"clip_norm: must be 0.5, as the run in this folder has it"):
        going_on(tmp_path, steps=9, given=["clip_norm"], clip_norm=0.1)
    with pytest.raises(InvalidInputError, match="decay_steps: must be given: it was 9"):
        going_on(tmp_path, steps=12)


@pytest.mark.parametrize("option", sorted(OTHERS))
def test_an_option_that_differs_is_refused_or_changed_by_name(option: str, tmp_path: Path) -> None:
    schedule = {"lr_schedule": "cosine"} if option == "decay_steps" else {}
    job = begun(tmp_path, **schedule)
    other = OTHERS[option]
    stored, name = option_values(job)[option], option.replace("_", "-")
    rule = f"{option}: must be {stored!r}, as the run in this folder has it, .* --change {name}, got {other!r}"
    with pytest.raises(InvalidInputError, match=rule):
        going_on(tmp_path, given=[option], **{option: other})
    again = going_on(tmp_path, given=[option], changed=[option], **{option: other})
    assert option_values(again)[option] == other
    (change,) = again.changes
    assert (change.step, change.option) == (6, option)
    assert (json.loads(change.old), json.loads(change.new)) == (stored, other)
    write_job(again)
    assert going_on(tmp_path).changes == (change,), "a start that made no checkpoint has changed it all the same"
    assert option_values(going_on(tmp_path))[option] == other


def test_an_option_goes_back_to_its_default_where_it_is_changed_and_not_given(tmp_path: Path) -> None:
    begun(tmp_path, clip_norm=0.5)
    assert going_on(tmp_path).clip_norm == 0.5
    assert going_on(tmp_path, changed=["clip_norm"]).clip_norm is None


def test_the_same_in_other_words_is_no_difference(tmp_path: Path) -> None:
    begun(tmp_path, loss="worker_agent.models.losses:default_loss", decay_steps=None, lr_schedule="cosine")
    given: dict[str, Any] = {
        "learning_rate": 0.01,
        "decay_steps": 9,
        "loss": "worker_agent.models.losses:default_loss?",
    }
    again = going_on(tmp_path, steps=20, given=given, **given)
    assert (again.decay_steps, again.changes) == (9, ())


def test_a_decay_that_ended_with_the_steps_needs_an_end_where_these_change(tmp_path: Path) -> None:
    begun(tmp_path, lr_schedule="cosine")
    with pytest.raises(InvalidInputError, match="decay_steps: must be given: it was 9, the steps that the run was"):
        going_on(tmp_path, steps=20)
    with pytest.raises(InvalidInputError, match=r"decay_steps: must be 9, as the run .* --change decay-steps, got 20"):
        going_on(tmp_path, steps=20, given=["decay_steps"], decay_steps=20)
    assert going_on(tmp_path, steps=20, changed=["decay_steps"]).last_decay_step == 20
    assert going_on(tmp_path).last_decay_step == 9


@pytest.mark.parametrize("name", ["seed", "model", "plan", "colour"])
def test_what_cannot_change_cannot_be_named(name: str, tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(InvalidInputError, match="change: must be one of optimizer, loss, learning_rate, "):
        going_on(tmp_path, changed=[name])


def test_a_folder_of_an_earlier_release_that_says_nothing_takes_what_is_given(tmp_path: Path) -> None:
    job = begun(tmp_path)
    job.directory.job.unlink()
    told: list[str] = []
    again = resumed(job_in(tmp_path, learning_rate=0.5), given=["learning_rate"], tell=told.append)
    assert (again.first_step, again.learning_rate) == (6, 0.5)
    assert told == ["the folder does not say with which options the run was begun: those that are given now are taken"]
    with pytest.raises(InvalidInputError, match="whose optimizer is momentum, got 'adam'"):
        resumed(job_in(tmp_path, plan=replace(PLAN, optimizer="adam")), given=[])


@pytest.mark.each_case
@pytest.mark.parametrize(("one", "other"), [("adam", "sgd"), ("sgd", "momentum"), ("momentum", "adamw")])
def test_another_optimizer_begins_with_new_states_and_the_old_rate(one: str, other: str, tmp_path: Path) -> None:
    job = job_in(tmp_path / "out", plan=replace(PLAN, optimizer=one), steps=3)
    run_ranks(job)
    changed = job_in(tmp_path / "out", plan=replace(PLAN, optimizer=other), steps=6)
    again = resumed(changed, given=["optimizer"], changed=["optimizer"])
    assert (again.first_step, again.plan.optimizer) == (3, other)
    assert again.largest_learning_rate == job.largest_learning_rate
    run_ranks(again)
    assert resumed(replace(changed, steps=9), given=[]).plan.optimizer == other
    with pytest.raises(InvalidInputError, match=f"optimizer: must be '{other}', as the run in this folder has it"):
        resumed(replace(job, steps=9), given=["optimizer"])


def test_another_loss_scale_begins_anew(tmp_path: Path) -> None:
    job = job_in(tmp_path / "out", steps=3, loss_scale=64.0)
    run_ranks(job)
    again = resumed(replace(job, steps=6, loss_scale=1024.0), given=["loss_scale"], changed=["loss_scale"])
    run_ranks(again)
    state = load_file(tmp_path / "out" / "checkpoints" / "step-6" / "stage-0.state")
    assert float(state["loss_scale/scale"]) == 1024.0


def test_a_resumed_command_trains_as_the_folder_says_and_its_report_lists_the_changes(tmp_path: Path) -> None:
    plan, out = make_plan("1f1b", (0, 2, 4), optimizer="sgd"), tmp_path / "out"
    options = ("--lr", "0.01", "--clip-norm", "0.01", "--loss", L1, "--optimizer", "adam", "--warmup-steps", "4")
    first = finish(command(plan, tmp_path, *options, steps=3))
    assert first.returncode == 0, first.stderr
    *arguments, seed, _ = command(plan, tmp_path, steps=6)
    assert seed == "--seed"
    arguments.append("--resume")
    second = finish(arguments)
    assert second.returncode == 0, second.stderr

    whole = RunJob(
        plan=replace(plan, optimizer="adam"),
        model=MLP,
        data=DATA,
        steps=6,
        seed=3,
        loss=L1,
        learning_rate=0.01,
        clip_norm=0.01,
        warmup_steps=4,
        checkpoint_every=6,
        out=str(tmp_path / "whole"),
        device="cpu",
    )
    run_ranks(whole)
    left, right = checkpoint_weights(out, 6), checkpoint_weights(tmp_path / "whole", 6)
    assert all((left[name] == right[name]).all() for name in right)

    words = command(plan, tmp_path, "--resume", "--lr", "0.5", steps=9)
    refused = finish(words)
    sentence = "error: --learning-rate: must be 0.01, as the run in this folder has it, or be changed from here on by "
    assert (refused.returncode, sentence in refused.stderr) == (2, True), refused.stderr
    changed = finish([*words, "--change", "lr", "--json"])
    assert changed.returncode == 0, changed.stderr
    report = json.loads(changed.stdout)
    assert report["changes"] == [{"step": 6, "option": "learning_rate", "old": 0.01, "new": 0.5}]
    assert report["options"] == option_values(replace(whole, learning_rate=0.5))
    assert (len(report["earlier_losses"]), len(report["losses"])) == (6, 3)
