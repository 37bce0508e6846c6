"""`pipeplan demo` as a newcomer runs it: real service, real agent, real training; and what goes wrong on the way."""

import json
import os
import signal
import socket
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeplan.client.client import Client
from pipeplan.documents.files import dump
from planner_service.demo.main_job import Workload, agent, main_job, service
from planner_service.demo.show import outcome_document, show_candidates, show_run
from tests.processes import processes_naming
from tests.waiting import wait_until

MAIN = "from pipeplan.cli.app import main; main()"


def demo(*arguments: str, before: str = "") -> list[str]:
    return [sys.executable, "-c", before + MAIN, "demo", *arguments]


TINY = Workload(
    model="preset:transformer?layers=2&hidden=32&heads=2&vocabulary=256&sequence_length=32",
    data="worker_agent.models.text:standard_library?sequence_length=32",
    microbatch_sizes=(1, 4),
    profile_s=0.0,
    batch_size=8,
    learning_rate=0.01,
    steps=(12, 12),
)
"""Trains in a moment, and its processes do without the seconds that each import of transformers takes."""


def test_the_main_job_goes_from_profile_to_comparison(tmp_path: Path) -> None:
    """The demo's, with a smaller model."""
    told: dict[str, tuple[int, int]] = {}
    with (
        service(tmp_path, 0) as (_, url),
        agent(tmp_path, url) as working,
        Client(url) as client,
    ):
        outcome = main_job(
            client,
            working,
            lambda phase, done, total, _: told.update({phase: (done, total)}),
            training_s=0.0,
            workload=TINY,
        )
        assert client.run(str(outcome.run_id)).report == outcome.report
        lanes = client.run_timeline(str(outcome.run_id)).lanes
    assert list(told) == ["profiling", "planning", "training"], told
    assert told["planning"] == (5, 5), told
    document = json.loads(dump(outcome_document(outcome, url)))
    require_whole(document, steps=12)
    assert len(lanes) == len(document["plan"]["placement"])  # one device wins where others are busy
    shown = Console(file=(text := StringIO()), width=120)
    show_candidates(shown, outcome)
    show_run(shown, outcome, url)
    assert "Candidates for batches of 8 samples" in text.getvalue()
    assert f"{url}/runs/{outcome.run_id}" in text.getvalue()


def require_whole(document: dict[str, Any], *, steps: int) -> None:
    """The document holds every planner's answer, the best one chosen, and a report whose parts add up."""
    assert {c["planner"] for c in document["candidates"]} == {"pipedream", "pipedream-2bw", "gpipe"}
    best = max(document["candidates"], key=lambda c: c["predicted_samples_per_s"])
    assert document["plan_id"] == best["id"] == document["plan"]["id"]
    report = document["report"]
    assert report["steps"] == len(report["losses"]) == steps
    assert sum(report["losses"][-3:]) < sum(report["losses"][:3])
    assert len(report["ranks"]) == len(document["plan"]["placement"])
    throughput, missed = report["throughput_samples_per_s"], report["missed"]
    assert throughput["measured"] > 0
    gap = throughput["measured"] - throughput["predicted"]
    parts = [missed[cause] for cause in ("compute", "link", "waiting", "other_programs")]
    assert abs(sum(parts) - gap) < 1e-6 * throughput["predicted"]
    assert all(0 <= rank["off_processor_fraction"] < 1 for rank in report["ranks"])


@pytest.mark.campaign
def test_the_main_job_runs_from_profile_to_comparison_and_lowers_the_loss() -> None:
    done = subprocess.run(demo("--json", "--training-s", "0"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    require_whole(document, steps=30)
    report = document["report"]
    assert len(report["ranks"]) == 2
    assert report["losses"][0] > 5.0
    assert report["losses"][-1] < 0.8 * report["losses"][0]
    for stage in report["stages"]:
        memory = stage["peak_memory_bytes"]
        assert abs(memory["measured"] - memory["predicted"]) < 0.1 * memory["predicted"]


def test_a_taken_port_is_one_sentence_and_leaves_no_process() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with subprocess.Popen(demo("--port", str(port)), stderr=subprocess.PIPE, text=True) as process:
            _, stderr = process.communicate()
    assert process.returncode == 1
    assert f"port {port} of 127.0.0.1 is taken" in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert not processes_naming(f"--port {port}")


def test_without_torch_it_says_what_to_install() -> None:
    done = subprocess.run(
        demo(before="import sys; sys.modules['torch'] = None; "),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "error: this command needs torch: pip install 'pipeplan[worker]'\n"


def test_a_dying_agent_ends_the_demo_in_one_sentence_and_leaves_no_process(tmp_path: Path) -> None:
    with started(tmp_path) as (process, log):
        os.kill(agent_of(tmp_path), signal.SIGKILL)
        assert process.wait() == 1
        assert "error: the agent was killed by signal 9" in log.read_text()
    wait_until(lambda: not processes_naming(tmp_path))


def test_an_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    with started(tmp_path) as (process, _):
        agent_of(tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    wait_until(lambda: not processes_naming(tmp_path))


@pytest.mark.campaign
def test_a_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    with started(tmp_path) as (process, _):
        agent_of(tmp_path)
        process.kill()
    wait_until(lambda: not processes_naming(tmp_path))


class started:  # noqa: N801 (reads as a verb in a with statement)
    """A demo whose files are under a folder of its own, so that its processes can be told from others."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "demo.log"
        environment = os.environ | {"TMPDIR": str(folder)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(demo(), stdout=subprocess.DEVNULL, stderr=log, env=environment)

    def __enter__(self) -> tuple[subprocess.Popen[bytes], Path]:
        return self.process, self.log

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def agent_of(folder: Path) -> int:
    """The process of a demo's agent, once there is one."""
    wait_until(lambda: processes_naming(f"--work-dir {folder}"))
    return processes_naming(f"--work-dir {folder}")[0]
