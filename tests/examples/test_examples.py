"""The examples, as their readers use them: copied to an empty folder, and run by the commands of their READMEs."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan import Cluster, load

EXAMPLES = Path(__file__).parents[2] / "examples"
MAIN = {
    "pipeplan": "from pipeplan.cli.app import main; main()",
    "pipeplan-agent": "from worker_agent.cli import main; main()",
}


def commands_of(readme: Path) -> list[list[str]]:
    """The command lines in a README's block."""
    block = readme.read_text().split("```")[1]
    return [shlex.split(line) for line in block.strip().splitlines()]


def run_readme(folder: Path, replaced: dict[str, str]) -> None:
    for program, *arguments in commands_of(folder / "README.md"):
        words = [replaced.get(word, word) for word in arguments]
        done = subprocess.run(
            [sys.executable, "-c", MAIN[program], *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (words, done.stderr)


@pytest.mark.campaign
@pytest.mark.each_case
@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_a_model_of_ones_own_is_profiled_planned_and_trained(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    run_readme(folder, {})
    assert len(json.loads((folder / "plan.json").read_text())["stages"]) == 2
    losses = json.loads((folder / "run1" / "run.json").read_text())["losses"]
    assert sum(losses[-5:]) < sum(losses[:5]), losses


def test_the_imported_profile_is_planned(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "imported", tmp_path / "imported")
    run_readme(folder, {})
    assert json.loads((folder / "vgg16.json").read_text())["blocks"]


def test_every_cluster_file_is_one() -> None:
    devices = {path.name: load(Cluster, path).devices for path in (EXAMPLES / "clusters").glob("*.json")}
    assert devices == {"cluster.json": 8, "servers.json": 32, "mixed.json": 8}


def test_the_notebooks_cells_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(EXAMPLES, tmp_path / "examples"))
    names: dict[str, object] = {}
    cells = json.loads(Path("library.ipynb").read_text())["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert names["plan"].throughput_samples_per_s > names["alone"].throughput_samples_per_s  # type: ignore[attr-defined]


def test_readmes_name_files_that_are_there() -> None:
    folders = {path.parent.name for path in EXAMPLES.glob("*/README.md")}
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({folder}/README.md)" in text for folder in folders)
