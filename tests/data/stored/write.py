"""What a release stores: two databases, documents, and a run's folder, written by the release itself.

    python tests/data/stored/write.py FOLDER

A folder beside this file holds what a release wrote when it was made, and is never written again: the tests open it
with the code of today. For a new release there is a new folder.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from pipeplan.documents.calibration import Calibration
from pipeplan.documents.files import parse, parse_plan
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import FIRST_VERSION
from planner_service.app import create_app
from planner_service.overview.openapi import CLUSTER
from planner_service.platform.settings import Settings
from tests.planner_service.examples import profile_document, request_document, run_result, run_task
from tests.planner_service.postgresql import running

JSON = dict[str, Any]
MODEL = "preset:mlp?depth=4&width=8"
DATA = "worker_agent.models.presets:regression?width=8"


def main(folder: Path) -> None:
    """Writes everything."""
    folder.mkdir(parents=True)
    ids = _database(f"sqlite:///{folder / 'service.sqlite3'}") | {"calibration": _run(folder)}
    (folder / "ids.json").write_text(json.dumps(ids, indent=2) + "\n")
    with running() as server:
        name = server.new_database()
        _database(server.url(name))
        dump = (str(server.programs / "pg_dump"), "--no-owner", "--inserts", "-h", str(server.folder), "-U", "pipeplan")
        text = subprocess.run((*dump, name), check=True, capture_output=True, text=True, cwd="/").stdout
        (folder / "postgresql.sql").write_text(text)


def _database(url: str) -> JSON:
    """A profile, a cluster, two plans, an alias, and a run of the first plan, through the API; their ids."""
    ids: JSON = {}
    with TestClient(create_app(Settings(database_url=url)), base_url="http://127.0.0.1") as http:

        def post(path: str, body: Mapping[str, Any]) -> JSON:
            answer = http.post(path, json=body)
            answer.raise_for_status()
            found: JSON = answer.json()
            return found

        ids["profile"] = post("/v1/profiles", profile_document())["id"]
        ids["cluster"] = post("/v1/clusters", asdict(CLUSTER))["id"]
        plans = [post("/v1/plans", request_document(planner=planner)) for planner in ("pipedream-2bw", "gpipe")]
        ids["plans"] = [plan["id"] for plan in plans]
        ids["planner_version"] = plans[0].get("planner_version", FIRST_VERSION)
        http.put("/v1/aliases/production", json={"plan_id": plans[0]["id"]}).raise_for_status()
        task = run_task(str(plans[0]["id"])).model_dump(mode="json")
        job = post("/v1/jobs", task)
        lease = post("/v1/jobs/lease", {"agent": "node-1"})
        result = run_result(parse_plan(json.dumps(plans[0])))
        post(f"/v1/jobs/{job['id']}/complete", {"token": lease["token"], "result": result.model_dump(mode="json")})
    return ids


def _run(folder: Path) -> str:
    """A profile, a plan of it and two steps of that, with checkpoints, by the commands; a calibration, and its id."""

    def do(module: str, *arguments: str) -> str:
        command = (sys.executable, "-m", module, *arguments)
        root = str(Path(__file__).parents[3])
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": root}
        )
        return done.stdout

    given = ("--profile", "profile.json", "--cluster", "cluster.json")
    of_model = ("--model", MODEL, "--data", DATA, "--microbatch-sizes", "2,4", "--devices", "2")
    do("worker_agent", "profile", *of_model, "-o", "profile.json", "--cluster-output", "cluster.json")
    asked = ("--planner", "pipedream-2bw", "--batch-size", "16", "--stages", "2", "--microbatch-size", "4", "--json")
    (folder / "plan.json").write_text(do("planner_service", "solve", *given, *asked))
    trained = ("--plan", "plan.json", "--model", MODEL, "--data", DATA, "--steps", "2", "--checkpoint-every", "1")
    do("worker_agent", "run", *trained, "--out", "run")
    for trace_of_this_machine in ("ranks", "logs"):
        shutil.rmtree(folder / "run" / trace_of_this_machine)
    (folder / "run" / "run.lock").unlink()
    do("planner_service", "calibrate", *given, "--run", "run", "-o", "calibration.json")
    return content_id(parse(Calibration, (folder / "calibration.json").read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
