"""A profile of one type of device on a cluster of another, in every command that plans."""

from pathlib import Path

import pytest

from tests.pipeplan.cli.commands import Ended, cluster_document, pipeplan, profile_document, write

V100, H100 = "V100-SXM2-16GB", "H100-SXM5-80GB"
REFUSAL = (
    f"error: profile.device.name: must be the cluster's type of device, '{H100}': profile the model on such a device, "
    f"or plan as if it were one (--as-if, options.as_if), got '{V100}'\n"
)
AS_IF = f"planned as if '{H100}' were '{V100}': the figures are of '{V100}', the profile's device"
COMMANDS = {
    "solve": ("--planner", "pipedream-2bw", "--batch-size", "8"),
    "smallest": ("--batch-size", "8", "--throughput", "1"),
    "largest": ("--batch-size", "8", "--depths", "2"),
    "sweep": ("--batch-size", "8", "--over", "devices=1,2"),
}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> str:
    """Each command that plans offline."""
    return str(request.param)


def ask(folder: Path, command: str, profiled: str, present: str, *more: str) -> Ended:
    profile = profile_document(4) | {"device": {"name": profiled, "memory_bytes": 10**9}}
    cluster = cluster_document() | {"device": {"name": present, "memory_bytes": 50_000}}
    files = ("--profile", write(folder / "profile.json", profile), "--cluster", write(folder / "cluster.json", cluster))
    return pipeplan(command, *files, *COMMANDS[command], *more)


def test_another_known_type_is_refused_with_what_to_do(tmp_path: Path, command: str) -> None:
    ended = ask(tmp_path, command, V100, H100, "--json")
    assert (ended.status, ended.out, ended.err) == (2, "", REFUSAL)


def test_as_if_allows_it_and_says_whose_figures_they_are(tmp_path: Path, command: str) -> None:
    shown = ask(tmp_path, command, V100, H100, "--as-if")
    assert shown.status == 0
    assert shown.out.count(f"warning: {AS_IF}") == 1
    ended = ask(tmp_path, command, V100, H100, "--as-if", "--json")
    assert ended.document["warnings"][0].startswith(AS_IF)


def test_a_driver_s_name_is_the_datasheet_s(tmp_path: Path, command: str) -> None:
    shown = ask(tmp_path, command, "Tesla V100-SXM2-16GB", V100)
    assert shown.status == 0
    assert "warning" not in shown.out


@pytest.mark.each_case
def test_free_and_unknown_names_are_planned_with_a_warning(tmp_path: Path, command: str) -> None:
    free = ask(tmp_path, command, "gpu", "cpu")
    assert "warning: the profile is of 'gpu', the cluster of 'cpu': the figures are of 'gpu'" in free.out
    unknown = ask(tmp_path, command, "unknown", H100)
    said = f"the profile does not name its device: its figures are taken as those of the cluster's device, '{H100}'"
    assert f"warning: {said}" in unknown.out


def test_the_plans_of_the_questions_say_it_too(tmp_path: Path) -> None:
    smallest = ask(tmp_path, "smallest", V100, H100, "--as-if", "--json").document
    assert smallest["plan"]["warnings"] == smallest["warnings"]
    sweep = ask(tmp_path, "sweep", V100, H100, "--as-if", "--json").document
    assert [row["plan"]["warnings"] for row in sweep["rows"]] == [sweep["warnings"]] * 2


def test_where_nothing_reaches_the_throughput_the_warning_stands_beside_the_answer(tmp_path: Path) -> None:
    ended = ask(tmp_path, "smallest", V100, H100, "--as-if", "--throughput", "1e9")
    assert ended.status == 3
    assert f"warning: {AS_IF}" in ended.err
