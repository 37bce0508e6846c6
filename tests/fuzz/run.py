"""The whole API against its own description: a service of its own, its examples stored, Schemathesis with all checks.

python -m tests.fuzz.run [--database sqlite|postgresql] [--max-examples N] [--seed N]
                         [--phases examples,coverage,fuzzing,stateful]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from pipeplan.documents.files import dump, parse_plan
from pipeplan.protocol.jobs import Completion, RunResult
from tests.planner_service.examples import run_result, run_task
from tests.planner_service.postgresql import running
from tests.planner_service.servers import pipeplan, serving

TOKEN = "FUZZ_TOKEN"
IDS = "FUZZ_IDS"
"""The variables by which the hooks know the run's token, and the ids of what is stored by parameter."""

JSON = {"Content-Type": "application/json"}
HERE = Path(__file__).parent
SCOPES = ("read", "plan", "agent", "admin")
IN_ORDER = ("/v1/profiles", "/v1/clusters", "/v1/plans", "/v1/jobs")
UNLIMITED = {
    "PIPEPLAN_REQUIRE_TOKENS": "true",
    "PIPEPLAN_REQUESTS_PER_S": "100000",
    "PIPEPLAN_FAILED_TOKENS_PER_MIN": "1000000",
}


def main() -> None:
    """Runs, lets Schemathesis print what it says, and ends with its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--max-examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phases", default="examples,coverage,fuzzing,stateful")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, new_database(asked.database, Path(folder)) as database:
        raise SystemExit(fuzz(database, Path(folder), asked.max_examples, asked.seed, asked.phases).returncode)


def fuzz(
    database: str, folder: Path, max_examples: int, seed: int, phases: str, *, quiet: bool = False
) -> subprocess.CompletedProcess[str]:
    """Schemathesis' result on a service with this database; `folder` takes what it writes."""
    token = new_token(database)
    with serving(database, "--exit-with-parent", **UNLIMITED) as (url, _):
        ids = store_examples(url, token)
        options = ["--max-examples", str(max_examples), "--seed", str(seed), "--phases", phases]
        config = ["--config-file", str(HERE / "schemathesis.toml")]
        schemathesis = [str(Path(sys.executable).parent / "schemathesis"), *config, "run", f"{url}/openapi.json"]
        command = [*schemathesis, "--mode", "all", "--header", f"Authorization: Bearer {token}"]
        variables = os.environ | {"SCHEMATHESIS_HOOKS": "tests.fuzz.hooks", "PYTHONPATH": str(HERE.parents[1])}
        variables |= {TOKEN: token, IDS: json.dumps(ids)}
        return subprocess.run(
            [*command, *options], cwd=folder, env=variables, text=True, capture_output=quiet, check=False
        )


@contextmanager
def new_database(kind: str, folder: Path) -> Iterator[str]:
    """The URL of a new database: a file in the folder, or one of a PostgreSQL that ends with the block."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'fuzz.sqlite3'}"
        return
    with running() as server:
        yield server.url(server.new_database())


def new_token(database: str) -> str:
    """A token of every scope."""
    scopes = [option for scope in SCOPES for option in ("--scope", scope)]
    made = pipeplan("token", "create", "--name", "fuzz", *scopes, "--database", database)
    if made.returncode != 0:
        raise LookupError(made.stderr)
    return made.stdout.strip()


def store_examples(url: str, token: str) -> dict[str, list[str]]:
    """What the description's examples say, so that its ids are of something, and two runs that have ended.

    Returns the ids of jobs and runs, which are random, by the parameters that name them.
    """
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        described = client.get("/openapi.json").json()["paths"]
        for path in IN_ORDER:
            examples = described[path]["post"]["requestBody"]["content"]["application/json"]["examples"]
            for example in examples.values():
                client.post(path, json=example["value"]).raise_for_status()
        plan_id = client.get("/v1/plans?limit=1").json()["items"][0]["id"]
        result = run_result(parse_plan(client.get(f"/v1/plans/{plan_id}").text))
        ended = [_run(client, plan_id, result) for _ in range(2)]
        return {"job_id": [job["id"] for job in ended], "run_id": [job["run_id"] for job in ended]}


def _run(client: httpx.Client, plan_id: str, result: RunResult) -> dict[str, str]:
    """A job of a run that has succeeded with this result."""
    enqueued = client.post("/v1/jobs", json=run_task(plan_id).model_dump(mode="json")).raise_for_status().json()
    while True:  # the examples' jobs come before it; they stay with the agent
        lease = client.post("/v1/jobs/lease", json={"agent": "fuzz"}).raise_for_status().json()
        if lease["job"]["id"] == enqueued["id"]:
            break
    completion = Completion(token=lease["token"], result=result)
    path = f"/v1/jobs/{enqueued['id']}/complete"
    job: dict[str, str] = client.post(path, content=dump(completion), headers=JSON).raise_for_status().json()
    return job


if __name__ == "__main__":
    main()
