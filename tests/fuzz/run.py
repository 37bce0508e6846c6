"""The whole API against its own description: a service of its own, its examples stored, Schemathesis with all checks.

python -m tests.fuzz.run [--max-examples N] [--seed N] [--phases examples,coverage,fuzzing,stateful]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from tests.planner_service.servers import pipeplan, serving

TOKEN = "FUZZ_TOKEN"
"""The variable by which the hooks know the run's token."""

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
    parser.add_argument("--max-examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phases", default="examples,coverage,fuzzing,stateful")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        raise SystemExit(fuzz(Path(folder), asked.max_examples, asked.seed, asked.phases).returncode)


def fuzz(
    folder: Path, max_examples: int, seed: int, phases: str, *, quiet: bool = False
) -> subprocess.CompletedProcess[str]:
    """Schemathesis' result on a service with a database in the folder."""
    database = folder / "fuzz.sqlite3"
    token = _token(database)
    with serving(database, "--exit-with-parent", **UNLIMITED) as (url, _):
        _store_examples(url, token)
        options = ["--max-examples", str(max_examples), "--seed", str(seed), "--phases", phases]
        config = ["--config-file", str(HERE / "schemathesis.toml")]
        schemathesis = [str(Path(sys.executable).parent / "schemathesis"), *config, "run", f"{url}/openapi.json"]
        command = [*schemathesis, "--mode", "all", "--header", f"Authorization: Bearer {token}"]
        variables = os.environ | {"SCHEMATHESIS_HOOKS": "tests.fuzz.hooks", "PYTHONPATH": str(HERE.parents[1])}
        variables[TOKEN] = token
        return subprocess.run(
            [*command, *options], cwd=folder, env=variables, text=True, capture_output=quiet, check=False
        )


def _token(database: Path) -> str:
    scopes = [option for scope in SCOPES for option in ("--scope", scope)]
    made = pipeplan("token", "create", "--name", "fuzz", *scopes, "--database", f"sqlite:///{database}")
    if made.returncode != 0:
        raise LookupError(made.stderr)
    return made.stdout.strip()


def _store_examples(url: str, token: str) -> None:
    """What the description's examples say, so that its ids are of something."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        described = client.get("/openapi.json").json()["paths"]
        for path in IN_ORDER:
            examples = described[path]["post"]["requestBody"]["content"]["application/json"]["examples"]
            for example in examples.values():
                client.post(path, json=example["value"]).raise_for_status()


if __name__ == "__main__":
    main()
