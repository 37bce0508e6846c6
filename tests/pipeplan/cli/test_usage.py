"""A command line that cannot be read ends with status 2 and one sentence that says where the help is."""

import pytest

from tests.pipeplan.cli.commands import pipeplan


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


def test_help_ends_well() -> None:
    assert pipeplan("solve", "--help").status == 0
