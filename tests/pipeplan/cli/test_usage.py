"""A command line that cannot be read ends with status 2 and one sentence that says where the help is."""

from pathlib import Path

import pytest

from tests.pipeplan.cli.commands import PROFILES, cluster_document, pipeplan, profile_document, write


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("solve", "--bogus", "1"), "No such option: --bogus"),
        (("solve",), "Missing option '--cluster'"),
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
        silent = pipeplan(*command)
        with monkeypatch.context() as terminal:
            terminal.setenv("FORCE_COLOR", "1")
            shown = pipeplan(*command)
        assert (sentence in silent.err, sentence in shown.err) == (False, True)
