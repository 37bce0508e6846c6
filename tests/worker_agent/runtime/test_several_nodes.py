"""`pipeplan-agent run` on several nodes: here each is a process on loopback, and torchrun is real."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from pipeplan.documents.plan import Plan
from tests.worker_agent.runtime.plans import make_plan
from tests.worker_agent.runtime.test_executor import checkpoint_weights
from tests.worker_agent.runtime.test_run_command import command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(plan: Plan, folder: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """The same command line on two nodes, started the second one first."""
    where = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    given = command(plan, folder, *where, *arguments)
    started = [
        subprocess.Popen([*given, "--node-rank", rank], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in ("1", "0")
    ]
    ended = [(one, *one.communicate(timeout=90)) for one in reversed(started)]
    return [subprocess.CompletedProcess(one.args, one.returncode, out, err) for one, out, err in ended]


def test_two_nodes_take_one_nodes_options_write_checkpoints_and_resume(tmp_path: Path) -> None:
    plan = make_plan("1f1b", (0, 2, 4), optimizer="adam")
    options = ("--clip-norm", "0.5", "--lr-schedule", "cosine", "--warmup-steps", "2")
    for done in together(plan, tmp_path, *options):
        assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [f"step-{step}" for step in range(1, 7)]
    assert json.loads((out / "ranks" / "job.json").read_text())["clip_norm"] == 0.5
    assert (out / "run.json").exists()
    whole = checkpoint_weights(out, 6)
    for step in (3, 4, 5, 6):
        shutil.rmtree(out / "checkpoints" / f"step-{step}")
    first, second = together(plan, tmp_path, *options, "--resume", "--json")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert json.loads(first.stdout)["first_step"] == 2
    weights = checkpoint_weights(out, 6)
    assert weights.keys() == whole.keys()
    assert all((weights[name] == whole[name]).all() for name in whole)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--loss", "a:b\nreboot"), "loss: must hold printable characters and no spaces"),
        (("--nodes", "3"), "nodes: must divide the plan's 2 workers, got 3"),
        (("--nodes", "2", "--node-rank", "2"), "node_rank: must be below the number of nodes (2), got 2"),
        (("--nodes", "2"), "master_addr: must say where the other nodes reach node 0, got None"),
        (
            ("--nodes", "2", "--master-addr", "127.0.0.1", "--max-restarts", "1"),
            "max_restarts: must be 0 among several nodes: start all of them again with --resume, got 1",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    plan = make_plan("1f1b", (0, 2, 4))
    done = subprocess.run(command(plan, tmp_path, *arguments), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
