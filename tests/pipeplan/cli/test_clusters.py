"""`pipeplan clusters`, and names of clusters in place of files in every command."""

from pathlib import Path

import pytest

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse, read
from pipeplan.documents.identity import content_id
from pipeplan.documents.named_clusters import SERVERS, named_cluster
from tests.pipeplan.cli.commands import pipeplan, profile_document, write


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return write(tmp_path / "profile.json", profile_document(blocks=4))


def test_the_list_has_every_name_with_its_source() -> None:
    listed = pipeplan("clusters", "--json").document
    assert {row["name"]: row["source"] for row in listed} == {name: one.source for name, one in SERVERS.items()}
    table = pipeplan("clusters").out
    assert all(name in table for name in SERVERS)
    assert "NVIDIA DGX H100 datasheet (2023): 8 x 400 Gb/s InfiniBand" in table


def test_a_name_is_shown_and_written_as_the_file_that_it_stands_for(tmp_path: Path) -> None:
    file = tmp_path / "C.json"
    shown = pipeplan("clusters", "p4d.24xlarge:3", "-o", file)
    assert shown.status == 0
    assert parse(Cluster, shown.out) == read(Cluster, file) == named_cluster("p4d.24xlarge:3")


def test_solve_takes_a_name_in_place_of_a_file(profile: Path, tmp_path: Path) -> None:
    asked = ("--profile", profile, "--batch-size", "8", "--planner", "pipedream-2bw", "--json")
    file = tmp_path / "C.json"
    pipeplan("clusters", "dgx-v100:2", "-o", file)
    by_name = pipeplan("solve", "--cluster", "dgx-v100:2", *asked).document
    by_file = pipeplan("solve", "--cluster", file, *asked).document
    assert by_name["feasible"] and by_name["cluster_id"] == content_id(named_cluster("dgx-v100:2"))
    assert {**by_name, "solve_time_s": 0} == {**by_file, "solve_time_s": 0}


def test_a_file_of_that_name_comes_first(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipeplan("clusters", "l4", "-o", "dgx-h100")
    ended = pipeplan("solve", "--profile", profile, "--cluster", "dgx-h100", "--batch-size", "8", "--json")
    assert ended.document["cluster_id"] == content_id(named_cluster("l4"))


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("smallest", ("--throughput", "1")),
        ("largest", ("--depths", "1")),
        ("sweep", ("--over", "devices=1,2", "--planner", "gpipe")),
    ],
)
def test_questions_take_a_name(profile: Path, command: str, arguments: tuple[str, ...]) -> None:
    asked: tuple[str | Path, ...] = (command, "--profile", profile, "--batch-size", "8", *arguments, "--json")
    assert pipeplan(*asked, "--cluster", "dgx-v100").status == 0
    assert "near: dgx-v100" in pipeplan(*asked, "--cluster", "dgx-v10").err


def test_check_takes_a_name(profile: Path, tmp_path: Path) -> None:
    asked = ("--profile", profile, "--cluster", "dgx-v100")
    plan = tmp_path / "plan.json"
    pipeplan("solve", *asked, "--planner", "gpipe", "--batch-size", "8", "-o", plan)
    assert all(finding["holds"] for finding in pipeplan("check", plan, *asked, "--json").document["findings"])
    other = pipeplan("check", plan, "--profile", profile, "--cluster", "dgx-v100:2", "--json").document
    origin = next(finding for finding in other["findings"] if finding["what"] == "origin")
    assert not origin["holds"] and "the plan's cluster is" in origin["detail"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("dgx-h10", "--cluster: must be a file, or NAME or NAME:NODES of a known cluster (near: dgx-h100"),
        ("dgx-h100:0", "--cluster: must have from 1 to 16384 nodes"),
        ("missing.json", "--cluster: must be a file that can be read: there is none of this name"),
        ("folder/missing", "--cluster: must be a file that can be read: there is none of this name"),
    ],
)
@pytest.mark.parametrize("command", ["solve", "calibrate"])
def test_what_is_neither_is_one_sentence(profile: Path, command: str, given: str, sentence: str) -> None:
    more = ("--batch-size", "8") if command == "solve" else ("--run", "nowhere")
    ended = pipeplan(command, "--profile", profile, "--cluster", given, *more)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {sentence}") and ended.err.count("\n") == 1
