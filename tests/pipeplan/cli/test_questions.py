"""`pipeplan smallest`, `largest` and `sweep`: documents, tables, exit statuses."""

from pathlib import Path

import pytest

from tests.pipeplan.cli.commands import Ended, pipeplan, profile_document, write


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    cluster = {
        "device": {"name": "cpu", "memory_bytes": 50_000},
        "levels": [{"size": 2, "bandwidth_bytes_per_s": 1e9}, {"size": 2, "bandwidth_bytes_per_s": 1e8}],
    }
    profile = write(tmp_path / "profile.json", profile_document(blocks=4))
    return ["--profile", str(profile), "--cluster", str(write(tmp_path / "cluster.json", cluster))]


def asked(command: str, files: list[str], *arguments: str) -> Ended:
    return pipeplan(command, *files, *arguments)


def test_smallest_says_what_is_needed_and_what_less_gives(files: list[str]) -> None:
    ended = asked("smallest", files, "--batch-size", "8", "--throughput", "12", "--json")
    assert ended.status == 0
    assert ended.document["devices"] == 2
    assert ended.document["next_fewer"]["devices"] == 1
    assert ended.document["plan"]["feasible"]
    shown = asked("smallest", files, "--batch-size", "8", "--throughput", "12")
    assert shown.out.startswith("2 devices reach 12 samples/s\nthe next fewer: 1 devices, ")


def test_smallest_ends_with_3_where_no_part_reaches_it(files: list[str]) -> None:
    ended = asked("smallest", files, "--batch-size", "8", "--throughput", "1e6")
    assert ended.status == 3
    assert ended.err.startswith("no part of the cluster reaches 1,000,000 samples/s; nearest: 4 devices")
    assert ended.out == ""


def test_largest_gives_a_row_a_depth_and_kind(files: list[str]) -> None:
    ended = asked("largest", files, "--batch-size", "8", "--depths", "1,2", "--schedule", "1f1b", "--json")
    assert ended.status == 0
    assert ended.document["repeat"] == {"start": 1, "stop": 3}
    assert [(size["depth"], size["recompute"]) for size in ended.document["sizes"]] == [(2, False), (2, True)]
    assert "Million parameters" in asked("largest", files, "--batch-size", "8", "--depths", "2").out


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--repeat", "7", "--repeat: must be start:stop"),
        ("--repeat", "3:1", "--repeat: must be start:stop with some of the 4 blocks"),
        ("--depths", "2,x", "--depths: must be whole numbers"),
        ("--depths", "5", "--depths: must not be more than the devices (4)"),
    ],
)
def test_largest_refuses_what_is_not_there(files: list[str], option: str, value: str, message: str) -> None:
    ended = asked("largest", files, "--batch-size", "8", option, value)
    assert ended.status == 2
    assert message in ended.err


def test_sweep_gives_a_row_a_value(files: list[str]) -> None:
    ended = asked("sweep", files, "--over", "batch-size=4,8,7.5", "--json")
    assert ended.status == 0
    assert [row["value"] for row in ended.document["rows"]] == [4, 8, 7.5]
    assert [row["feasible"] for row in ended.document["rows"]] == [True, True, False]
    table = asked("sweep", files, "--over", "devices=1,2,3,4", "--batch-size", "8", "--planner", "auto")
    assert "must be whole units of a level of the cluster: 1, 2, 4" in table.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--over", "devices=1"], "batch-size: is required unless it is varied"),
        (["--over", "height=1", "--batch-size", "8"], "--over: must be WHAT=VALUES"),
        (["--over", "devices=a", "--batch-size", "8"], "--over: must be devices= and numbers"),
        (
            ["--over", "bandwidth=0", "--batch-size", "8"],
            "--over: the bandwidth must be a finite number above 0, got 0",
        ),
    ],
)
def test_sweep_refuses_what_it_cannot_vary(files: list[str], arguments: list[str], message: str) -> None:
    ended = asked("sweep", files, *arguments)
    assert ended.status == 2
    assert message in ended.err
