"""A plan from a model and a cluster's name: service and agent, both real processes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeplan.client.client import Client
from pipeplan.documents.files import parse_plan
from pipeplan.documents.plan import Plan
from pipeplan.errors import ServiceError
from pipeplan.planners.problem import Options
from pipeplan.protocol.estimates import ModelPlanRequest
from pipeplan.protocol.jobs import Job
from tests.planner_service.servers import environment, served
from tests.worker_agent.agent.nodes import working

MODEL = "hf:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=100&n_positions=64"
REQUEST = ModelPlanRequest(
    model=MODEL, cluster_id="dgx-a100:2", planner="gpipe", batch_size=16, sequence_length=64, dtype="bfloat16"
)

ASKED = (
    *("--model", MODEL, "--cluster", "dgx-a100:2", "--planner", "gpipe", "--batch-size", "16"),
    *("--sequence-length", "64", "--dtype", "bfloat16"),
)


FOR_MEGATRON = Options(engine="megatron", optimizer="adamw")


def pipeplan(folder: Path, *arguments: str) -> Any:
    """The document that the command prints."""
    done = subprocess.run(
        [sys.executable, "-c", "from pipeplan.cli.app import main; main()", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.campaign
def test_an_agent_estimates_what_the_command_line_does_and_the_plan_is_the_same(tmp_path: Path) -> None:
    heard: list[Job] = []
    with (
        served(tmp_path / "service.sqlite3") as url,
        Client(url) as service,
        working(url, tmp_path / "work"),
    ):
        made = service.create_plan(REQUEST, on_progress=heard.append)
        assert isinstance(made.answer, Plan) and made.answer.estimated
        assert service.cluster(made.answer.cluster_id).devices == 16
        again = pipeplan(tmp_path, "plan", "create", "--url", url, *ASKED, "--json")
        assert again["id"] == made.plan_id
        with pytest.raises(ServiceError, match="sequence_length: must be at most the 64 positions of the model's"):
            service.create_plan(REQUEST.model_copy(update={"sequence_length": 65}))
        refused = REQUEST.model_copy(update={"model": "os:getcwd"})
        with pytest.raises(ServiceError, match="model: must be a factory that this agent's operator allows"):
            service.create_plan(refused)
        elsewhere = REQUEST.model_copy(update={"planner": "auto", "options": FOR_MEGATRON})
        for_megatron = service.create_plan(elsewhere)
        assert isinstance(for_megatron.answer, Plan) and for_megatron.answer.engine == "megatron"
        known = {each.form.tensor for each in service.profile(for_megatron.answer.profile_id).forms}
        assert known == {1, 2}, "two heads can be shared by two devices, and no more"
        four = elsewhere.model_copy(update={"options": replace(FOR_MEGATRON, tensor=4)})
        with pytest.raises(ServiceError, match="tensor: must divide"):
            service.create_plan(four)
    assert [job.state for job in heard][-1] == "succeeded"

    offline = pipeplan(tmp_path, "solve", *ASKED, "--no-cache", "--json")
    assert offline["id"] == made.plan_id and parse_plan(offline) == made.answer
    asked = ("--planner", "auto", "--engine", "megatron", "--optimizer", "adamw")
    assert pipeplan(tmp_path, "solve", *ASKED, *asked, "--no-cache", "--json")["id"] == for_megatron.plan_id
