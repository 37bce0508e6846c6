"""The split backward on the oldest release of torch that pyproject.toml allows, and on the newest.

The split relies on more of torch than its documentation promises: it changes the class of parameters, and looks at
versions, hooks and transforms. Its tests run with each of the two releases in front of the installed packages.
"""

import faulthandler
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
TESTS = {
    "tests/worker_agent/engine/test_backward.py": "campaign or not campaign",
    "tests/worker_agent/runtime/test_split_backward.py": "not campaign",
}
"""Files, and which of their tests: all of the split itself, and one of each kind of run."""


ASKED = "PIPEPLAN_TEST_RELEASES"

UNREACHABLE = ("connection broken by", "Temporary failure in name resolution")
"""What pip says where it cannot reach the package index."""


def allowed() -> Requirement:
    """The releases of torch that the worker takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = map(Requirement, project["optional-dependencies"]["worker"])
    return next(requirement for requirement in stated if requirement.name == "torch")


def oldest() -> str:
    """The oldest of them, with its corrections."""
    (version,) = (each.version for each in allowed().specifier if each.operator == ">=")
    return f"torch=={version}.*"


def run(*arguments: object, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """This Python, with some packages in front of the installed ones."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def packages(tmp_path: Path) -> Iterator[Path]:
    """A folder for 7 GB, gone after the test. The limit of a test is for those that hang: these have their own."""
    faulthandler.cancel_dump_traceback_later()
    folder = tmp_path / "packages"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.campaign
@pytest.mark.skipif(ASKED not in os.environ, reason="installs 7 GB twice: `make test-releases`")
@pytest.mark.parametrize("release", [oldest(), str(allowed())])
def test_the_split_backward_is_exact_on_the_oldest_and_on_the_newest_torch(release: str, packages: Path) -> None:
    installed = run("-m", "pip", "install", "--quiet", "--no-cache-dir", "--target", packages, release)
    if installed.returncode and any(words in installed.stderr for words in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached for {release}: {installed.stderr.splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr

    found = run("-c", "import torch; print(torch.__version__, torch.__file__)", packages=packages)
    version, place = found.stdout.split()
    assert version.split("+")[0] in Requirement(release).specifier and Path(place).is_relative_to(packages)
    for file, which in TESTS.items():
        tested = run("-m", "pytest", "-p", "no:xdist", "-m", which, file, packages=packages)
        assert tested.returncode == 0, f"torch {version}\n{tested.stdout[-4000:]}{tested.stderr[-2000:]}"
