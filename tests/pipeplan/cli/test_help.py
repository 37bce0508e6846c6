"""Help names every option whole at 80 columns, in groups; the shell completes names and files."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pipeplan.cli.app import build_app
from pipeplan.cli.completion import clusters
from pipeplan.cli.solve import _FLAGS, _GROUPS
from pipeplan.planners.problem import Options
from worker_agent.cli import app as agent

NARROW = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
MARGIN = 2
"""The columns that help leaves free on a terminal. The runner of tests takes all: it let two lines be cut."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize("app", [build_app(), agent], ids=["pipeplan", "pipeplan-agent"])
def test_every_option_of_every_command_is_named_whole_at_80_columns(app: typer.Typer) -> None:
    seen = 0
    for path, command in commands(typer.main.get_command(app)):
        shown = CliRunner().invoke(app, [*path, "--help"], env=NARROW, terminal_width=80 - MARGIN)
        assert shown.exit_code == 0
        words = shown.output.replace(",", " ").split()
        assert "…" not in shown.output
        listed = shown.output.partition("\nCommands:\n")[2].partition("\n\n")[0]
        assert "..." not in listed, path
        for parameter in command.params:
            for name in (*parameter.opts, *parameter.secondary_opts):
                if name.startswith("-") and not parameter.hidden:
                    assert name in words, (path, name)
                    seen += 1
    assert seen > 40


def test_a_command_alone_is_what_it_is_among_all() -> None:
    """Where the command line names one, the others are not loaded."""
    whole = typer.main.get_command(build_app())
    for name, command in whole.commands.items():  # type: ignore[attr-defined]
        alone = typer.main.get_command(build_app(name))
        assert list(alone.commands) == [name]  # type: ignore[attr-defined]
        for path, _ in commands(command, (name,)):
            asked = [*path, "--help"]
            shown = [CliRunner().invoke(build_app(only), asked, env=NARROW).output for only in (None, name)]
            assert shown[0] == shown[1]
    assert list(typer.main.get_command(build_app("nonsense")).commands) == list(whole.commands)  # type: ignore[attr-defined]


def test_a_query_to_a_service_loads_no_planner() -> None:
    code = "import sys; from pipeplan.cli.app import build_app; build_app('alias'); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_options_of_planners_stand_in_groups_each_in_one() -> None:
    grouped = " ".join(_GROUPS.values()).split()
    assert sorted(grouped) == sorted(_FLAGS) == sorted(option.name for option in fields(Options))
    shown = CliRunner().invoke(build_app(), ["solve", "--help"], env=NARROW).output
    headings = [line for line in shown.splitlines() if line in {f"{heading}:" for heading in ("Options", *_GROUPS)}]
    assert sorted(headings) == sorted(f"{heading}:" for heading in ("Options", *_GROUPS))
    assert shown.index("\nOther engines:") < shown.index("--tensor")


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("solve --planner pi", {"pipedream", "pipedream-2bw"}),
        ("solve --schedule zb", {"zb-h1", "zb-v"}),
        ("solve --optimizer ad", {"adam", "adamw"}),
        ("solve --cluster mi", {"mine.json", "mixed/"}),
        ("simulate --schedule zb", {"zb-h1", "zb-v"}),
        ("plan get --format y", {"yaml"}),
        ("plan export --format tor", {"torchrun", "torchtitan"}),
        ("sim", {"simulate"}),
    ],
)
def test_bash_completes_names_and_files(typed: str, offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    (tmp_path / "mine.txt").write_text("")
    (tmp_path / "mixed").mkdir()
    words = f"pipeplan {typed}"
    asked = {"_PIPEPLAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    start = "import sys; sys.argv = ['pipeplan']; from pipeplan.cli.app import main; main()"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", start],
        env=os.environ | asked | {"PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == offered, done.stderr


def test_clusters_are_completed_in_folders_too(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("{}")
    assert clusters(f"{tmp_path}/o") == [f"{tmp_path}/one.json"]
    assert "dgx-h100" in clusters("dgx-")
    assert clusters(f"{tmp_path}/none/o") == []
