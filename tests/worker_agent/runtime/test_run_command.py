"""`pipeplan-agent run` as its users start it: real torchrun, real processes, real faults."""

import csv
import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.documents.files import dump, plan_document
from pipeplan.documents.plan import Plan
from pipeplan.protocol.runs import read_run
from tests.waiting import wait_until
from tests.worker_agent.commands import AGENT, finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights
from tests.worker_agent.runtime.test_executor import checkpoint_weights
from worker_agent.runtime.job import RunJob
from worker_agent.runtime.status import read_status

MLP = "worker_agent.models.presets:mlp?width=8&depth=4"
SLEEP = "worker_agent.models.presets:sleep?width=8&depth=4"
HANGS = "tests.worker_agent.runtime.faulty:hangs?after=20"
LINEAR = "worker_agent.models.presets:mlp?width=8&depth=1"
DATA = "worker_agent.models.presets:regression?width=8&samples=64"


def command(plan: Plan, folder: Path, *arguments: str, model: str = MLP, steps: int = 6) -> list[str]:
    """The arguments of `pipeplan-agent` that run a plan into `folder/out`."""
    path = folder / "plan.json"
    path.write_text(dump(plan_document(plan)))
    given = ["--plan", str(path), "--model", model, "--data", DATA, "--steps", str(steps), "--out", str(folder / "out")]
    return ["run", *given, "--seed", "3", *arguments]


def steps_of(out: Path) -> list[int]:
    """The steps whose figures a run's folder has."""
    with (out / "steps.csv").open(newline="") as lines:
        return [int(row["step"]) for row in csv.DictReader(lines) if float(row["loss"]) > 0]


def undisturbed(plan: Plan, out: Path, *, checkpoint_every: int, model: str = MLP, steps: int = 6) -> Weights:
    """The weights of a run like the command's that nothing interrupts; its ranks come from the fork server."""
    run_ranks(
        RunJob(
            plan=plan,
            model=model,
            data=DATA,
            steps=steps,
            seed=3,
            checkpoint_every=checkpoint_every,
            out=str(out),
            device="cpu",
        )
    )
    return checkpoint_weights(out, steps)


@pytest.mark.campaign
@pytest.mark.each_case
@pytest.mark.parametrize(("schedule", "optimizer"), [("pipedream-2bw", "adam"), ("pipedream", "momentum")])
def test_a_run_resumed_from_a_checkpoint_ends_bit_for_bit_like_one_that_never_stopped(
    schedule: str, optimizer: str, tmp_path: Path
) -> None:
    plan = make_plan(schedule, (0, 1, 4), microbatches=1 if schedule == "pipedream" else 4, optimizer=optimizer)
    whole = undisturbed(plan, tmp_path / "out", checkpoint_every=2)
    for step in (4, 6):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step-{step}")
    resumed = finish(command(plan, tmp_path, "--checkpoint-every", "2", "--resume", "--json"))
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["first_step"] == 2
    left = read_run(tmp_path / "out")
    assert (left.plan, left.timeline.batches, len(left.peak_resident_bytes)) == (plan, 4, 2)
    weights = checkpoint_weights(tmp_path / "out", 6)
    assert weights.keys() == whole.keys()
    assert all((weights[name] == whole[name]).all() for name in whole)


def test_a_killed_rank_is_named_and_the_resumed_run_ends_bit_for_bit_like_an_undisturbed_one(tmp_path: Path) -> None:
    slow = f"{SLEEP}&forward_s=0.002&backward_s=0.004"
    plan = make_plan("1f1b", (0, 2, 4), optimizer="adam")
    whole = undisturbed(plan, tmp_path / "whole", checkpoint_every=3, model=slow, steps=12)
    arguments = command(plan, tmp_path, "--checkpoint-every", "3", model=slow, steps=12)
    out = tmp_path / "out"
    with subprocess.Popen([*AGENT, *arguments], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (out / "checkpoints" / "step-3" / "manifest.json").exists())
        ranks = [rank_process(process.pid, rank) for rank in (0, 1)]
        os.kill(ranks[0], signal.SIGKILL)
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert "rank 0 (stage 0, replica 0) was killed by SIGKILL" in stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    resumed = finish([*arguments, "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    weights = checkpoint_weights(out, 12)
    assert whole.keys() == weights.keys()
    assert all((weights[name] == whole[name]).all() for name in whole)
    assert steps_of(out) == list(range(1, 13)), "what the killed attempt measured until the checkpoint stays"


@pytest.mark.campaign
def test_a_run_that_loses_ranks_twice_starts_again_by_itself_and_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    """Once before there is a checkpoint, once after."""
    slow = f"{SLEEP}&forward_s=0.002&backward_s=0.004"
    plan = make_plan("pipedream-2bw", (0, 2, 4), optimizer="adam")
    whole = undisturbed(plan, tmp_path / "whole", checkpoint_every=3, model=slow, steps=12)
    arguments = command(plan, tmp_path, "--checkpoint-every", "3", model=slow, steps=12)
    out = tmp_path / "out"
    with subprocess.Popen([*AGENT, *arguments, "--max-restarts", "2"], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: at_instruction(out / "ranks" / "rank-1.status") > 5)
        first = rank_process(process.pid, 1)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: (out / "checkpoints" / "step-6" / "manifest.json").exists())
        os.kill(rank_process(process.pid, 0), signal.SIGKILL)
        _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "starting again from step 0 (1 restarts left)" in stderr
    assert "starting again from step 6 (0 restarts left)" in stderr
    assert steps_of(out) == list(range(1, 13))
    weights = checkpoint_weights(out, 12)
    assert whole.keys() == weights.keys()
    assert all((weights[name] == whole[name]).all() for name in whole)


@pytest.mark.campaign
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_with_its_last_instruction_and_leaves_no_process(victim: int, tmp_path: Path) -> None:
    arguments = command(make_plan("1f1b", (0, 2, 4)), tmp_path, model=SLEEP, steps=1000)
    with subprocess.Popen([*AGENT, *arguments], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: at_instruction(tmp_path / "out" / "ranks" / f"rank-{victim}.status") > 40)
        ranks = [rank_process(process.pid, rank) for rank in (0, 1)]
        os.kill(ranks[victim], signal.SIGKILL)
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert f"rank {victim} (stage {victim}, replica 0) was killed by SIGKILL" in stderr
    status = read_status(tmp_path / "out" / "ranks" / f"rank-{victim}.status")
    assert status is not None and f"after {status.batches_done} of 1000 steps" in stderr
    assert [line for line in stderr.strip().splitlines() if not line.startswith("step ")] == stderr.splitlines()[-1:]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.each_case
@pytest.mark.parametrize("at", [-1, 40])
def test_a_rank_that_is_stopped_is_named_within_15_s_and_leaves_no_process(at: int, tmp_path: Path) -> None:
    """In its start as well as in its steps; the rank that waits for it is not blamed."""
    arguments = command(make_plan("1f1b", (0, 2, 4)), tmp_path, model=SLEEP, steps=1000)
    with subprocess.Popen([*AGENT, *arguments], stderr=subprocess.PIPE, text=True) as process:
        path = tmp_path / "out" / "ranks" / "rank-1.status"
        wait_until(lambda: read_status(path) is not None and at_instruction(path) >= at)
        ranks = [rank_process(process.pid, rank) for rank in (0, 1)]
        os.kill(ranks[1], signal.SIGSTOP)
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert "rank 1 (stage 1, replica 0) hung: no sign of life for 1" in stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.campaign
def test_a_rank_that_is_lost_in_its_model_is_named(tmp_path: Path) -> None:
    """It gives signs of life; the plan says that an instruction takes no time."""
    plan = make_plan("1f1b", (0, 2, 4))
    quick = replace(
        plan, costs=tuple(replace(costs, forward_s=0.001, backward_s=0.002, recompute_s=0.0) for costs in plan.costs)
    )
    result = finish(command(quick, tmp_path, model=HANGS, steps=1000))
    assert result.returncode == 1
    assert "rank 0 (stage 0, replica 0) hung: 10 s in one instruction at F20@4 after 4 of 1000 steps" in result.stderr


@pytest.mark.campaign
def test_when_the_command_itself_is_killed_its_ranks_end(tmp_path: Path) -> None:
    arguments = command(make_plan("1f1b", (0, 2, 4)), tmp_path, model=SLEEP, steps=1000)
    with subprocess.Popen([*AGENT, *arguments], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: at_instruction(tmp_path / "out" / "ranks" / "rank-1.status") > 10)
        ranks = [rank_process(process.pid, rank) for rank in (0, 1)]
        process.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))


@pytest.mark.campaign
def test_a_model_that_fails_is_named_with_instruction_and_error(tmp_path: Path) -> None:
    result = finish(command(make_plan("1f1b", (0, 2, 4)), tmp_path, model=MLP.replace("width=8", "width=9")))
    assert result.returncode == 1
    assert (
        "rank 0 (stage 0, replica 0) failed (RuntimeError: mat1 and mat2 shapes cannot be multiplied " in result.stderr
    )
    assert "in block 0 (0.linear)) at F1" in result.stderr
    assert "at F1 after 0 of 6 steps; log: " in result.stderr


@pytest.mark.campaign
def test_a_loss_that_diverges_ends_the_run_and_says_so(tmp_path: Path) -> None:
    result = finish(command(make_plan("1f1b", (0, 1)), tmp_path, "--learning-rate", "1000", steps=400, model=LINEAR))
    assert result.returncode == 1
    assert "try a lower learning rate" in result.stderr
    assert "rank 0 (stage 0, replica 0) failed (the loss is " in result.stderr


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--steps", "0"), "--steps: must be a whole number of at least 1, got 0"),
        (("--timeout-s", "1e20"), "--timeout-s: must be at most 1,000,000, got 1e+20"),
        (("--steps", str(10**20)), f"--steps: must be at most {2**63 - 1}, got {10**20}"),
        (("--model", MLP.replace("depth=4", "depth=5")), "--model: must have the plan's 4 blocks, got 5"),
        (("--model", "no.such.module:factory"), "model: "),
        (("--data", "worker_agent.models.presets:no_such_factory"), "data: "),
        (("--record", "0"), "error: --record: must be a whole number of at least 1, got 0"),
        (("--learning-rate", "nan"), "--learning-rate: must be a finite number above 0, got nan"),
        (("--device", "tpu"), "--device: must be one of auto, cpu, cuda, got 'tpu'"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_status_2(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    model = arguments[1] if arguments[0] == "--model" else MLP
    rest = () if arguments[0] == "--model" else arguments
    result = finish(command(make_plan("1f1b", (0, 2, 4)), tmp_path, *rest, model=model))
    assert result.returncode == 2, result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.campaign
def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    result = finish(command(make_plan("1f1b", (0, 2, 4)), tmp_path))
    assert result.returncode == 2
    assert "out: must be a new folder, or be given with --resume" in result.stderr


def test_a_file_of_ones_own_with_the_name_of_a_runs_is_not_overwritten(tmp_path: Path) -> None:
    arguments = command(make_plan("1f1b", (0, 2, 4)), tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "steps.csv").write_text("mine")
    result = finish(arguments)
    assert result.returncode == 2
    assert "out: must hold no other file by the name of a run's: move it, got" in result.stderr
    assert (tmp_path / "out" / "steps.csv").read_text() == "mine"


@pytest.mark.campaign
def test_another_plan_cannot_resume_a_checkpoint(tmp_path: Path) -> None:
    assert finish(command(make_plan("1f1b", (0, 2, 4)), tmp_path, "--checkpoint-every", "3")).returncode == 0
    result = finish(command(make_plan("gpipe", (0, 2, 4)), tmp_path, "--resume", steps=9))
    assert result.returncode == 2
    assert "plan: must be the one that wrote the checkpoint" in result.stderr


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank, among the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(int(c) for c in children if f"\0RANK={rank}\0" in Path(f"/proc/{c}/environ").read_text())


def at_instruction(path: Path) -> int:
    """The instruction that a rank is at; -1 before it is at one."""
    status = read_status(path)
    return -1 if status is None else status.instruction
