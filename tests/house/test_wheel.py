"""The wheel, in an empty environment without extras: it plans and simulates there, and says what it lacks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.documents.files import save
from tests.pipeplan.builders import Cell, cluster, profile

ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A program, to its end."""
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it, and nothing but what the wheel asks for."""
    made = tmp_path_factory.mktemp("wheel")
    for command in (
        (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, ROOT),
        (sys.executable, "-m", "venv", made / "venv"),
    ):
        ended = run(*command, cwd=made)
        assert ended.returncode == 0, ended.stderr
    (wheel,) = made.glob("*.whl")
    ended = run(made / "venv" / "bin" / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=made)
    assert ended.returncode == 0, ended.stderr
    save(profile([Cell(weight_bytes=4, output_bytes=4, activation_bytes=4)] * 4), made / "profile.json")
    save(cluster((2, 1.0e9)), made / "cluster.json")
    return made


def pipeplan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command."""
    return run(folder / "venv" / "bin" / "pipeplan", *arguments, cwd=folder)


pytestmark = pytest.mark.campaign  # an environment of its own

ASKED = ("--profile", "profile.json", "--cluster", "cluster.json", "--batch-size", "8")


def test_the_installed_wheel_solves_checks_and_simulates(folder: Path) -> None:
    solved = pipeplan(folder, "solve", "--planner", "auto", *ASKED, "--json", "-o", "plan.json")
    assert solved.returncode == 0, solved.stderr
    assert json.loads(solved.stdout)["feasible"] is True
    played = pipeplan(folder, "simulate", "--schedule", "1f1b", "--stages", "2", "--microbatches", "4", "--json")
    assert json.loads(played.stdout)["bubble_fraction"] == pytest.approx(1 / 5)
    proven = pipeplan(folder, "solve", "--planner", "pipedream", *ASKED[:4], "--batch-size", "1", "-o", "proven.json")
    assert proven.returncode == 0, proven.stderr
    checked = pipeplan(folder, "check", "proven.json", *ASKED[:4])
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_both_programs_say_their_version(folder: Path) -> None:
    for program in ("pipeplan", "pipeplan-agent"):
        said = run(folder / "venv" / "bin" / program, "--version", cwd=folder)
        assert (said.returncode, said.stdout) == (0, "pipeplan 0.1.0\n"), said.stderr


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("serve",), "service"),
        (("db", "upgrade"), "service"),
        (("demo",), "service,worker"),
        (("solve", "--planner", "exact", *ASKED), "exact"),
    ],
)
def test_what_needs_an_extra_says_which_in_one_sentence(folder: Path, arguments: tuple[str, ...], extra: str) -> None:
    ended = pipeplan(folder, *arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert f"pip install 'pipeplan[{extra}]'" in ended.stderr


def test_the_wheel_holds_types_and_the_licence(folder: Path) -> None:
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for package in ("pipeplan", "planner_service", "worker_agent"):
        assert (packages / package / "py.typed").is_file()
    (licence,) = packages.glob("pipeplan-*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text(encoding="utf-8")
