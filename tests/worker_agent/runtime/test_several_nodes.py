"""`pipeplan-agent run` on several nodes: here each is a process on loopback, and torchrun is real."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeplan.documents.plan import Plan
from tests.processes import free_port
from tests.worker_agent.commands import AGENT, finish
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.processes import run_ranks
from tests.worker_agent.runtime.reference import Weights
from tests.worker_agent.runtime.test_executor import checkpoint_weights
from tests.worker_agent.runtime.test_run_command import DATA, MLP, command
from worker_agent.runtime.job import RunJob


def together(plan: Plan, folder: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """The same command line on two nodes, started the second one first."""
    where = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    given = command(plan, folder, *where, *arguments)
    started = [
        subprocess.Popen(
            [*AGENT, *given, "--node-rank", rank], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in ("1", "0")
    ]
    ended = [(one, *one.communicate()) for one in reversed(started)]
    return [subprocess.CompletedProcess(one.args, one.returncode, out, err) for one, out, err in ended]


PLAN = make_plan("1f1b", (0, 2, 4), optimizer="adam")
OPTIONS = ("--clip-norm", "0.5", "--lr-schedule", "cosine", "--warmup-steps", "2", "--checkpoint-every", "1")


def one_nodes(out: Path) -> Weights:
    """The weights of the same run on one node, which `OPTIONS` describe."""
    job = RunJob(
        plan=PLAN,
        model=MLP,
        data=DATA,
        steps=6,
        seed=3,
        clip_norm=0.5,
        lr_schedule="cosine",
        warmup_steps=2,
        checkpoint_every=1,
        out=str(out),
        device="cpu",
    )
    run_ranks(job)
    return checkpoint_weights(out, 6)


def test_two_nodes_take_one_nodes_options_and_write_checkpoints(tmp_path: Path) -> None:
    for done in together(PLAN, tmp_path, *OPTIONS):
        assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [f"step-{step}" for step in range(1, 7)]
    assert json.loads((out / "ranks" / "job.json").read_text())["clip_norm"] == 0.5
    assert (out / "run.json").exists()
    whole, weights = one_nodes(tmp_path / "whole"), checkpoint_weights(out, 6)
    assert weights.keys() == whole.keys()
    assert all((weights[name] == whole[name]).all() for name in whole)


@pytest.mark.campaign
def test_a_run_over_two_nodes_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = one_nodes(out)
    for step in (3, 4, 5, 6):
        shutil.rmtree(out / "checkpoints" / f"step-{step}")
    first, second = together(PLAN, tmp_path, *OPTIONS, "--resume", "--json")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert json.loads(first.stdout)["first_step"] == 2
    weights = checkpoint_weights(out, 6)
    assert weights.keys() == whole.keys()
    assert all((weights[name] == whole[name]).all() for name in whole)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--loss", "a:b\nreboot"), "--loss: must hold printable characters and no spaces"),
        (("--nodes", "3"), "--nodes: must divide the plan's 2 workers, got 3"),
        (("--nodes", "2", "--node-rank", "2"), "--node-rank: must be below the number of nodes (2), got 2"),
        (("--nodes", "2"), "--master-addr: must say where the other nodes reach node 0"),
        (
            ("--nodes", "2", "--master-addr", "127.0.0.1", "--max-restarts", "1"),
            "--max-restarts: must be 0 among several nodes: start all of them again with --resume, got 1",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    plan = make_plan("1f1b", (0, 2, 4))
    done = finish(command(plan, tmp_path, *arguments))
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
