"""What earlier releases stored: used by today's code, and by a next release whose documents have a field more each."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeplan.documents.identity import FIRST_FIELDS
from tests.data.stored.read import use_database, use_documents
from tests.planner_service.postgresql import PostgreSQL

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "data" / "stored"
RELEASES = sorted(path.name for path in STORED.iterdir() if (path / "ids.json").exists())
MODEL, DATA = "preset:mlp?depth=4&width=8", "worker_agent.models.presets:regression?width=8"
PATIENCE_S = 300.0


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of database."""
    kind: str = request.param
    return kind


@pytest.fixture(params=RELEASES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a release stored."""
    copied = tmp_path / "stored"
    shutil.copytree(STORED / request.param, copied)
    return copied


@pytest.fixture
def url(folder: Path, kind: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The release's database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'service.sqlite3'}"
        return
    server: PostgreSQL = request.getfixturevalue("postgresql")
    name = server.empty_database()
    psql = (str(server.programs / "psql"), "-q", "-v", "ON_ERROR_STOP=1", "-h", str(server.folder), "-U", "pipeplan")
    text = (folder / "postgresql.sql").read_text()
    subprocess.run((*psql, name), input=text, check=True, text=True, stdout=subprocess.DEVNULL, cwd="/")
    yield server.url(name)
    server.drop(name)


def test_todays_code_finds_everything_under_its_old_id(folder: Path, url: str) -> None:
    use_documents(folder)
    use_database(url, json.loads((folder / "ids.json").read_text()))


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of a release that has given every class of a document one more optional field."""
    root = tmp_path_factory.mktemp("next")
    for package in ("pipeplan", "planner_service", "worker_agent", "migrations", "tests"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    given = set()
    for path in (root / "pipeplan" / "documents").rglob("*.py"):
        text = path.read_text()
        for name in FIRST_FIELDS:
            pattern = rf"(\nclass {name}:.*?\n)(    __pydantic_config__|    def |    @|\n\n)"
            changed = re.sub(pattern, r"\1    novelty: int = 0\n\2", text, count=1, flags=re.DOTALL)
            given |= {name} if changed != text else set()
            text = changed
        path.write_text(text)
    assert given == set(FIRST_FIELDS)
    return root


@pytest.mark.each_case
def test_a_next_release_finds_everything_under_its_old_id(folder: Path, url: str, next_release: Path) -> None:
    command = (sys.executable, "-m", "tests.data.stored.read", str(folder), url)
    done = subprocess.run(command, cwd=next_release, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.each_case
@pytest.mark.parametrize("next_one", [False, True], ids=["today", "next release"])
def test_a_run_goes_on_from_an_earlier_checkpoint(folder: Path, next_one: bool, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue("next_release") if next_one else ROOT
    given = ("--plan", folder / "plan.json", "--model", MODEL, "--data", DATA, "--steps", "4")
    command = (sys.executable, "-m", "worker_agent", "run", *map(str, given), "--out", str(folder / "run"), "--resume")
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "run" / "run.json").read_text())
    assert (report["first_step"], report["steps"]) == (2, 2)
    assert report["plan_id"] == json.loads((folder / "plan.json").read_text())["id"]
