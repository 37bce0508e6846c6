"""A command line that cannot be read ends with status 2 and one sentence that says where the help is."""

import io
import re
import threading
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from pipeplan.cli.console import progress_lines
from tests.pipeplan.cli.commands import PROFILES, cluster_document, pipeplan, profile_document, write
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("solve", "--bogus", "1"), "No such option: --bogus"),
        (("solve",), "Missing options '--cluster', '--batch-size' ("),
        (("solve", "--batch-size", "8"), "Missing option '--cluster' ("),
        (("nothing",), "No such command 'nothing'"),
        (("plan", "list", "--limit", "9999"), "Invalid value for '--limit'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    ended = pipeplan(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {sentence}")
    assert ended.err.count("\n") == 1
    assert "--help` lists what there is" in ended.err


@pytest.mark.parametrize("arguments", [(), ("plan",)])
def test_a_command_that_lacks_everything_shows_its_help(arguments: tuple[str, ...]) -> None:
    ended = pipeplan(*arguments)
    assert ended.status == 2
    assert "Usage:" in ended.out + ended.err


def test_asking_for_help_ends_with_status_0() -> None:
    assert pipeplan("solve", "--help").status == 0


def test_what_may_take_long_says_on_a_terminal_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check, a calibration, a large simulation and an import were silent until they ended."""
    profile = write(tmp_path / "P.json", profile_document(4))
    files = ("--profile", profile, "--cluster", write(tmp_path / "C.json", cluster_document()))
    plan = tmp_path / "plan.json"
    assert pipeplan("solve", *files, "--planner", "gpipe", "--batch-size", "4", "-o", plan).status == 0
    graph, out = PROFILES / "vgg16.graph.txt", tmp_path / "vgg16.json"
    commands = {
        "checking origin, costs, play and proof": ("check", plan, *files),
        "playing the streams": ("simulate", "--schedule", "gpipe", "--stages", "2", "--microbatches", "2"),
        "importing": ("profile", "import", graph, "--format", "pipedream-graph", "-o", out),
    }
    for sentence, command in commands.items():
        with monkeypatch.context() as terminal:
            terminal.setenv("FORCE_COLOR", "1")
            shown = pipeplan(*command)
        assert sentence in shown.err


def test_without_a_terminal_lines_say_it_as_soon_as_there_is_something_to_say() -> None:
    stream = io.StringIO()

    def lines() -> list[str]:
        return re.sub(r" \(\d+ s\)", "", stream.getvalue()).splitlines()

    with redirect_stderr(stream), progress_lines(every_s=0.001) as say:
        say("measuring: 1 of 2")
        wait_until(lines)
        say("measuring: 2 of 2\x1b")
        wait_until(lambda: lines()[-1] == r"measuring: 2 of 2\x1b")
    assert set(lines()) == {"measuring: 1 of 2", r"measuring: 2 of 2\x1b"}
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_a_long_search_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every planner, on a terminal or not; it was silent but for one planner on a terminal."""
    profile = write(tmp_path / "P.json", profile_document(4))
    files = ("--profile", profile, "--cluster", write(tmp_path / "C.json", cluster_document()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    for planner in ("gpipe", "exact"):
        ended = pipeplan("solve", *files, "--planner", planner, "--batch-size", "4", "--json")
        assert ended.status == 0 and "searching" in ended.err and ended.document["feasible"]
