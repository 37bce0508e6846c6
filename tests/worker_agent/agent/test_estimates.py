"""A plan from a model and a cluster's name: service and agent, both real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.client.client import ServiceClient
from pipeplan.documents.files import parse_plan
from pipeplan.documents.plan import Plan
from pipeplan.errors import ServiceError
from pipeplan.protocol.estimates import ModelPlanRequest
from pipeplan.protocol.jobs import Job
from tests.planner_service.servers import environment, serving
from tests.worker_agent.agent.nodes import working

MODEL = "hf:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=100&n_positions=64"
REQUEST = ModelPlanRequest(
    model=MODEL, cluster_id="dgx-a100:2", planner="gpipe", batch_size=16, sequence_length=64, dtype="bfloat16"
)


def test_an_agent_estimates_what_the_command_line_does_and_the_plan_is_the_same(tmp_path: Path) -> None:
    heard: list[Job] = []
    with (
        serving(tmp_path / "service.sqlite3") as (url, _),
        ServiceClient(url) as service,
        working(url, tmp_path / "work"),
    ):
        made = service.create_plan(REQUEST, on_progress=heard.append)
        assert isinstance(made.answer, Plan) and made.answer.estimated
        assert service.cluster(made.answer.cluster_id).devices == 16
        with pytest.raises(ServiceError, match="sequence_length: must be at most the 64 positions of the model's"):
            service.create_plan(REQUEST.model_copy(update={"sequence_length": 65}))
        refused = REQUEST.model_copy(update={"model": "os:getcwd"})
        with pytest.raises(ServiceError, match="model: must be a factory that this agent's operator allows"):
            service.create_plan(refused)
    assert [job.state for job in heard][-1] == "succeeded"

    asked = ("--model", MODEL, "--cluster", "dgx-a100:2", "--planner", "gpipe", "--batch-size", "16")
    given = ("--sequence-length", "64", "--dtype", "bfloat16", "--no-cache", "-o", "plan.json")
    done = subprocess.run(
        [sys.executable, "-c", "from pipeplan.cli.app import main; main()", "solve", *asked, *given],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert parse_plan((tmp_path / "plan.json").read_text()) == made.answer
