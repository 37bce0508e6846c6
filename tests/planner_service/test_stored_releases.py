"""What earlier releases stored: used by today's code, and by a next release whose documents have a field more each.

The oldest kept release is the oldest folder in tests/data/stored: its rows are read by today's code. Its reader is gone
with its code, so today's code stands for it: it reads rows in which every document holds what a next release added.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, insert, select, update

from pipeplan.documents.identity import FIRST_FIELDS
from planner_service.app import create_app
from planner_service.jobs import choice
from planner_service.platform.database import Database
from planner_service.platform.settings import Settings
from planner_service.platform.tables import audit, jobs, metadata
from tests.data.stored.read import use_database, use_documents
from tests.planner_service.postgresql import PostgreSQL
from tests.planner_service.servers import pipeplan

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "data" / "stored"
RELEASES = sorted(path.name for path in STORED.iterdir() if (path / "ids.json").exists())
MODEL, DATA = "preset:mlp?depth=4&width=8", "worker_agent.models.presets:regression?width=8"


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
    for path in (*(root / "pipeplan" / "documents").rglob("*.py"), root / "pipeplan" / "planners" / "problem.py"):
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
    done = subprocess.run(command, cwd=next_release, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


DOCUMENTS = {
    "profiles": ("content",),
    "clusters": ("content", "device_types"),
    "plans": ("content", "request", "device_types"),
    "jobs": ("task", "progress", "answer"),
    "runs": ("report", "timeline_head"),
    "events": ("data",),
    "agents": ("content",),
}
"""The columns that hold JSON, by table."""

AGENT: dict[str, Any] = {"name": "node-9", "instance": "instance-9", "host": "h", "address": "10.0.0.9", "port": 29400}
AGENT |= {"devices": 1, "device_name": "any", "memory_bytes": 1, "torch_version": "2", "version": "1"}
LINKS = {"kind": "links", "devices": 2}


def _in_a_next_release(url: str) -> None:
    """Every stored document holds what today's code does not know."""
    database = Database(url)
    with database.write() as connection:
        for name, columns in DOCUMENTS.items():
            table = metadata.tables[name]
            for row in connection.execute(select(table)).mappings().all():
                changed = {column: _renewed(row[column]) for column in columns if row[column] is not None}
                connection.execute(update(table).where(table.c.sequence == row["sequence"]).values(changed))
        newest = select(func.max(jobs.c.sequence)).scalar_subquery()
        connection.execute(update(jobs).where(jobs.c.sequence == newest).values(kind="distil", progress="[1]"))
        later = {"needs": '{"novelty":1}', "needs_id": "f" * 32}
        connection.execute(update(jobs).where(jobs.c.sequence == newest - 1).values(later))
        entry = {"action": "model.distil", "outcome": "novel", "actor": "local", "via": "novel"}
        connection.execute(insert(audit).values(created_at=datetime.now(UTC), **entry))
    database.close()


def _renewed(text: str) -> str:
    document = json.loads(text)
    return json.dumps(document | {"novelty": 1} if isinstance(document, dict) else {"novelty": document})


def test_what_a_next_release_stored_stops_nothing(folder: Path, url: str) -> None:
    """One such job stopped every lease, every list of jobs, the first page and every cancelling."""
    settings = Settings(database_url=url)
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as http:
        assert http.post("/v1/agents", json=AGENT).status_code == 201
        unreadable = [http.post("/v1/jobs", json=LINKS).json()["id"] for _ in range(3 * choice.JOBS)]
        held = http.post("/v1/jobs/lease", json={"agent": "node-8"}).json()
        beat = {"token": held["token"], "progress": {"done": 1, "total": 2}}
        assert http.post(f"/v1/jobs/{held['job']['id']}/heartbeat", json=beat).status_code == 200
    _in_a_next_release(url)

    with TestClient(create_app(settings), base_url="http://127.0.0.1") as http:

        def got(path: str) -> Any:
            answer = http.get(path)
            assert answer.status_code == 200, (path, answer.text)
            return answer.json() if path.startswith("/v1") else answer.text

        ids = json.loads((folder / "ids.json").read_text())
        names = {*DOCUMENTS, "aliases", "tokens", "audit"} - {"events"}
        lists = {name: got(f"/v1/{name}?limit=200")["items"] for name in names}
        assert {one["id"] for one in lists["jobs"]} >= set(unreadable)
        assert {one["task"]["kind"] for one in lists["jobs"]} == {"unreadable"}
        assert all("novelty: is not a known key" in one["task"]["reason"] for one in lists["jobs"][1:])
        assert [one["id"] for one in lists["plans"]] == ids["plans"][::-1]
        assert [one["device_types"] for one in lists["clusters"]] == ["unreadable"]
        assert [(one["name"], "novelty" in one["unreadable"]) for one in lists["agents"]] == [("node-9", True)]
        assert "model.distil" in {one["action"] for one in lists["audit"]}
        (run,) = lists["runs"]
        for page in ("", f"jobs/{unreadable[0]}", *names - {"tokens"}):
            assert "Internal Server Error" not in got(f"/{page}")
        refused = http.get(f"/v1/runs/{run['id']}")
        assert (refused.status_code, "another release stored it" in refused.json()["detail"]) == (409, True)
        assert "another release" in got(f"/v1/jobs/{unreadable[1]}")["waiting_for"]

        assert http.post("/v1/jobs/lease", json={"agent": "node-8"}).status_code == 204
        readable = http.post("/v1/jobs", json=LINKS).json()["id"]
        assert http.post("/v1/jobs/lease", json={"agent": "node-8"}).json()["job"]["id"] == readable
        again = {"agent": "node-9", "instance": AGENT["instance"]}
        assert http.post("/v1/jobs/lease", json=again).status_code == 404  # an agent then registers again
        assert http.post("/v1/agents", json=AGENT).json()["unreadable"] is None
        assert http.post("/v1/jobs/lease", json=again).status_code == 204

        assert http.post(f"/v1/jobs/{held['job']['id']}/heartbeat", json=beat).status_code == 200
        for job_id in (unreadable[0], unreadable[-2], unreadable[-1]):
            cancelled = http.post(f"/v1/jobs/{job_id}/cancel")
            assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
            assert http.post(f"/v1/jobs/{job_id}/retry").json()["state"] == "queued"
    pruned = pipeplan("db", "prune", "--keep", "0", "--json", PIPEPLAN_DATABASE_URL=url)
    assert pruned.returncode == 0, pruned.stderr


@pytest.mark.each_case
@pytest.mark.parametrize("next_one", [False, True], ids=["today", "next release"])
def test_a_run_goes_on_from_an_earlier_checkpoint(folder: Path, next_one: bool, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue("next_release") if next_one else ROOT
    given = ("--plan", folder / "plan.json", "--model", MODEL, "--data", DATA, "--steps", "4")
    command = (sys.executable, "-m", "worker_agent", "run", *map(str, given), "--out", str(folder / "run"), "--resume")
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "run" / "run.json").read_text())
    assert (report["first_step"], report["steps"]) == (2, 2)
    assert report["plan_id"] == json.loads((folder / "plan.json").read_text())["id"]
