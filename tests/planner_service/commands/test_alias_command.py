"""`pipeplan alias`, and plans by alias: what scripts get, and the exit statuses, against a real service."""

import json
from pathlib import Path

import pytest

from pipeplan.cli.plan import FORMAT_NAMES
from pipeplan.exports.formats import FORMATS
from tests.planner_service.commands.test_plan_command import Run, _create, folder, run, url

__all__ = ["folder", "run", "url"]


@pytest.fixture
def plan_ids(run: Run, folder: Path) -> list[str]:
    """Two plans, of different schedules."""
    options = ((), ("--stages", "2", "--schedule", "pipedream-2bw"))
    return [json.loads(_create(run, folder, "--json", *given)[1])["id"] for given in options]


def test_an_alias_is_set_moved_told_of_and_deleted(run: Run, plan_ids: list[str]) -> None:
    first = json.loads(run("alias", "set", "team/prod", plan_ids[0], "--new", "--json")[1])
    assert (first["plan_id"], first["moved_by"]) == (plan_ids[0], "local")
    assert run("alias", "set", "team/prod", plan_ids[1], "--if-version", str(first["version"]))[0] == 0
    status, stdout, stderr = run("alias", "set", "team/prod", plan_ids[0], "--if-version", str(first["version"]))
    assert (status, stdout, stderr.count("\n")) == (7, "", 1)
    assert plan_ids[1] in run("alias", "get", "team/prod")[1]
    assert "team/prod" in run("alias", "list", "--plan", plan_ids[1])[1]
    history = json.loads(run("alias", "history", "team/prod", "--json")[1])
    assert [move["plan_id"] for move in history["items"]] == plan_ids[::-1]
    assert run("alias", "delete", "team/prod")[:2] == (0, "")
    assert "(deleted)" in run("alias", "history", "team/prod")[1]
    assert run("alias", "get", "team/prod")[0] == 4


def test_a_plan_may_be_named_by_its_alias_everywhere(run: Run, plan_ids: list[str]) -> None:
    run("alias", "set", "one", plan_ids[0])
    run("alias", "set", "other", "one")
    assert json.loads(run("plan", "get", "one", "--json")[1])["id"] == plan_ids[0]
    compared = json.loads(run("plan", "compare", "one", plan_ids[1], "--json")[1])
    assert [plan["id"] for plan in compared["plans"]] == plan_ids
    assert compared["speeds"][0]["ratio"] == 1.0
    assert json.loads(run("alias", "get", "other", "--json")[1])["plan_id"] == plan_ids[0]
    assert json.loads(run("plan", "alternatives", "one", "--json")[1])["plan_id"] == plan_ids[0]
    assert "configurations considered" in run("plan", "alternatives", "one")[1]


def test_lists_are_filtered_and_sorted(run: Run, plan_ids: list[str]) -> None:
    fastest = json.loads(run("plan", "list", "--sort", "-throughput", "--limit", "1", "--json")[1])
    rates = [item["throughput_samples_per_s"] for item in json.loads(run("plan", "list", "--json")[1])["items"]]
    assert fastest["items"][0]["throughput_samples_per_s"] == max(rates)
    assert json.loads(run("plan", "list", "--planner", "nobody", "--json")[1]) == {"items": [], "next_cursor": None}
    assert run("plan", "list", "--sort", "speed")[0] == 2
    assert run("plan", "list", "--created-after", "yesterday")[2].startswith("error: --created-after: ")


def test_a_plan_is_exported_to_a_file_or_to_standard_output(
    run: Run,
    plan_ids: list[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.yaml"
    assert run("plan", "export", plan_ids[0], "--format", "kubernetes", "-o", str(path))[:2] == (0, "")
    assert "kind: Job" in path.read_text()
    assert run("plan", "export", plan_ids[0], "--format", "slurm")[1].startswith("#!/usr/bin/env bash\n#SBATCH")
    other = run("plan", "export", plan_ids[0], "--format", "megatron", "--target-version", "1")
    assert (other[0], other[2].startswith("error: --target-version: must be left out for megatron")) == (2, True)
    refused = run("plan", "export", plan_ids[0], "--format", "horovod")
    assert refused == (2, "", refused[2])
    assert refused[2].startswith("error: --format: must be one of torchrun")


def test_the_commands_formats_are_the_services() -> None:
    assert tuple(FORMATS) == FORMAT_NAMES
