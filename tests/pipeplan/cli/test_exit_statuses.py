"""One table of exit statuses: what errors end with, what --help says, and what the docs say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pipeplan.cli.console import EPILOG, MEANINGS, STATUSES, run_app
from tests.pipeplan.cli.commands import pipeplan


def test_the_docs_table_is_todays() -> None:
    page = (Path(__file__).parents[3] / "docs" / "ci.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert {int(status): meaning for status, meaning in rows} == MEANINGS


def test_every_error_has_a_status_that_is_described() -> None:
    assert set(STATUSES.values()) <= set(MEANINGS)


@pytest.mark.parametrize("status", sorted(MEANINGS))
def test_help_names_every_status(status: int) -> None:
    shown = " ".join(pipeplan("--help").out.split())
    assert f"{status} {MEANINGS[status].partition(':')[0]}" in shown
    assert EPILOG.startswith("Exit status: 0 done")


INTERRUPTED_WHILE_LOADING = """
import sys
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pipeplan.cli.simulate":
            raise KeyboardInterrupt
        return None

sys.meta_path.insert(0, Interrupting())
sys.argv = ["pipeplan", "simulate"]
from pipeplan.cli.app import main
main()
"""


def test_an_interrupt_while_a_command_is_loaded_is_a_sentence_and_130() -> None:
    """It ended in a traceback: commands are loaded before they run."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_WHILE_LOADING], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")


def test_an_interrupt_while_a_command_runs_is_a_sentence_and_130(capsys: pytest.CaptureFixture[str]) -> None:
    """It said nothing: typer hands such an interrupt on as a status."""
    app = typer.Typer()

    @app.command()
    def waits() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_app(app, [])
    assert (ended.value.code, capsys.readouterr().err) == (130, "error: interrupted\n")
