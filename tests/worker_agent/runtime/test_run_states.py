"""However a run ends, its folder says how far it came and why it ended, and has the losses until then."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from pipeplan.errors import InvalidInputError
from pipeplan.protocol.runs import read_run
from tests.waiting import wait_until
from tests.worker_agent.commands import AGENT, finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.test_run_command import MLP, SLEEP, command, rank_process, steps_of

SLOW = f"{SLEEP}&forward_s=0.002&backward_s=0.004"
PLAN = make_plan("1f1b", (0, 2, 4))


def test_steps_are_written_as_a_run_goes_and_a_failed_runs_report_says_why(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = command(PLAN, tmp_path, "--checkpoint-every", "3", model=SLOW, steps=1000)
    with subprocess.Popen([*AGENT, *arguments], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (out / "steps.csv").exists() and len(steps_of(out)) > 3)
        report = json.loads((out / "run.json").read_text())
        assert (report["state"], report["error"]) == ("running", None)
        os.kill(rank_process(process.pid, 1), signal.SIGKILL)
        _, stderr = process.communicate()
    assert process.returncode == 1
    report = json.loads((out / "run.json").read_text())
    assert report["state"] == "failed"
    assert stderr.splitlines()[-1] == f"error: {report['error']}"
    assert "rank 1 (stage 1, replica 0) was killed by SIGKILL" in report["error"]
    assert report["step"] - report["checkpoint"] in range(3)
    assert steps_of(out) == list(range(1, report["step"] + 1))
    with pytest.raises(InvalidInputError, match=r"run: must be the folder of a run that has .* failed: rank"):
        read_run(out)
    last = report["checkpoint"] + 2
    resumed = finish([*(str(last) if word == "1000" else word for word in arguments), "--resume", "--json"])
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["state"] == "succeeded"
    assert steps_of(out) == list(range(1, last + 1))


def test_the_steps_of_a_run_whose_launcher_is_killed_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = command(PLAN, tmp_path, "--checkpoint-every", "0", model=SLOW, steps=1000)
    with subprocess.Popen([*AGENT, *arguments], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (out / "steps.csv").exists() and len(steps_of(out)) > 3)
        process.kill()
    assert steps_of(out) == list(range(1, len(steps_of(out)) + 1))


def test_a_run_that_did_no_step_does_not_keep_its_folder(tmp_path: Path) -> None:
    refused = finish(command(PLAN, tmp_path, model=MLP.replace("depth=4", "depth=5")))
    assert refused.returncode == 2
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (report["state"], report["step"], report["checkpoint"]) == ("failed", 0, None)
    assert report["error"].startswith("model: must have the plan's 4 blocks, got 5")
    again = finish(command(PLAN, tmp_path, "--lr", "0.01"))
    assert again.returncode == 0, again.stderr
    other = finish(command(PLAN, tmp_path))
    assert (other.returncode, "out: must be a new folder, or be given with --resume" in other.stderr) == (2, True)


def test_a_change_without_a_run_to_resume_is_refused(tmp_path: Path) -> None:
    refused = finish(command(PLAN, tmp_path, "--change", "lr"))
    assert refused.returncode == 2
    assert "error: --change: must be given with --resume" in refused.stderr
