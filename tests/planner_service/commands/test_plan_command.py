"""`pipeplan plan` against a real service: what scripts get, and the exit statuses."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.cli.app import main
from pipeplan.documents.files import dump
from planner_service.overview.openapi import CLUSTER, PROFILE
from tests.planner_service.servers import served

Run = Callable[..., tuple[int, str, str]]

REQUEST = ("--planner", "pipedream-2bw", "--batch-size", "16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile, a cluster, and a cluster that is too small."""
    path = tmp_path_factory.mktemp("documents")
    (path / "profile.json").write_text(dump(PROFILE))
    (path / "cluster.json").write_text(dump(CLUSTER))
    tiny = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=1000))
    (path / "tiny.json").write_text(dump(tiny))
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A service."""
    with served(folder / "service.sqlite3") as address:
        yield address


@pytest.fixture
def run(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`pipeplan` with its arguments, in this process: the exit status, standard output and standard error."""
    monkeypatch.setenv("PIPEPLAN_URL", url)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeplan", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def _create(run: Run, folder: Path, *options: str, cluster: str = "cluster.json") -> tuple[int, str, str]:
    files = ("--profile", str(folder / "profile.json"), "--cluster", str(folder / cluster))
    return run("plan", "create", *files, *REQUEST, *options)


@pytest.mark.campaign
def test_plans_are_created_got_listed_and_compared(run: Run, folder: Path) -> None:
    status, stdout, stderr = _create(run, folder, "--json")
    assert status == 0, stderr
    first = json.loads(stdout)
    second = json.loads(_create(run, folder, "--json", "--stages", "2", "--schedule", "pipedream-2bw")[1])
    got = json.loads(run("plan", "get", first["id"], "--json")[1])
    assert got == {key: value for key, value in first.items() if key != "solve_time_s"}
    listed = json.loads(run("plan", "list", "--json")[1])
    assert {item["id"] for item in listed["items"]} >= {first["id"], second["id"]}
    compared = json.loads(run("plan", "compare", first["id"], second["id"], "--json")[1])
    assert [plan["id"] for plan in compared["plans"]] == [first["id"], second["id"]]
    assert compared["plans"][0]["speed_against_first"] == 1.0


@pytest.mark.campaign
def test_without_json_the_plan_commands_print_tables(run: Run, folder: Path) -> None:
    status, stdout, _ = _create(run, folder)
    assert status == 0
    assert "samples/s" in stdout
    plan_id = stdout.split()[1]
    for command, shown in ((("get", plan_id), plan_id), (("list",), plan_id), (("compare", plan_id, plan_id), "1.00x")):
        status, stdout, stderr = run("plan", *command)
        assert (status, stderr) == (0, "")
        assert shown in stdout
    listed = {item["id"]: item for item in json.loads(run("plan", "list", "--json")[1])["items"]}
    types = listed[plan_id]["device_types"]
    assert " x " in types and types in run("plan", "list")[1]


def test_no_feasible_plan_is_status_3_with_the_reasons(run: Run, folder: Path) -> None:
    status, stdout, stderr = _create(run, folder, "--json", cluster="tiny.json")
    assert (status, json.loads(stdout)["feasible"]) == (3, False)
    assert "no feasible plan" in stderr


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("get", "nothing"), 4, "error: there is no plan nothing"),
        (("compare", "one"), 2, "error: ID: must name at least two plans"),
        (("create", "--profile", "x.json", "--cluster", "y", *REQUEST), 2, "error: "),
        (("create", "--profile", "x", "--cluster", "y", *REQUEST), 2, "error: --profile: must be the id of a stored"),
        (("list", "--url", "http://127.0.0.1:9"), 6, "error: the service at http://127.0.0.1:9 cannot be reached"),
        (("list", "--url", "nonsense"), 2, "error: --url: must be a URL"),
    ],
)
def test_errors_are_one_sentence_with_the_status_of_their_kind(
    run: Run, arguments: tuple[str, ...], status: int, sentence: str
) -> None:
    done = run("plan", *arguments)
    assert (done[0], done[1]) == (status, "")
    assert done[2].startswith(sentence)
    assert done[2].count("\n") == 1


@pytest.mark.campaign
def test_a_plan_for_another_type_of_device_is_refused_unless_as_if_and_says_so(run: Run, folder: Path) -> None:
    for noun, document, name in (("profile", PROFILE, "V100-SXM2-16GB"), ("cluster", CLUSTER, "H100-SXM5-80GB")):
        named = replace(document, device=replace(document.device, name=name))
        (folder / f"{noun}-{name}.json").write_text(dump(named))
    files = ("--profile", f"{folder}/profile-V100-SXM2-16GB.json", "--cluster", f"{folder}/cluster-H100-SXM5-80GB.json")
    status, _, stderr = run("plan", "create", *files, *REQUEST)
    assert status == 2
    assert "profile.device.name: must be the cluster's type of device, 'H100-SXM5-80GB'" in stderr
    status, stdout, _ = run("plan", "create", *files, *REQUEST, "--as-if", "--json")
    assert status == 0
    plan = json.loads(stdout)
    assert plan["warnings"][0].startswith("planned as if 'H100-SXM5-80GB' were 'V100-SXM2-16GB'")
    _, shown, _ = run("plan", "get", plan["id"])
    assert f"warning: {plan['warnings'][0]}" in shown
