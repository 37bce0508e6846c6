"""What the pages of an empty service tell a person to enter works as it stands, in the order in which it is needed."""

import html
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.planner_service.servers import environment, pipeplan, served
from tests.waiting import PATIENCE_S

PAGES = ("/", "/profiles", "/clusters", "/aliases", "/jobs", "/runs", "/agents")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A new service on a port that is not the usual one."""
    database = tmp_path_factory.mktemp("service") / "service.sqlite3"
    with served(database) as url, httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def _snippets(client: httpx.Client, address: str) -> list[str]:
    page = client.get(address, headers={"Accept": "text/html"}).raise_for_status().text
    return [html.unescape(text) for text in re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)]


def _shell(command: str, folder: Path, **changes: str) -> subprocess.Popen[str]:
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    changed = environment(PATH=scripts, NO_PROXY="*", HOME=str(folder), **changes)
    out = subprocess.PIPE
    return subprocess.Popen(["bash", "-ec", command], stdout=out, stderr=out, text=True, cwd=folder, env=changed)


def _ran(command: str, folder: Path, **changes: str) -> str:
    process = _shell(command, folder, **changes)
    out, err = process.communicate()
    assert process.returncode == 0, (command, out, err)
    return out


@pytest.mark.campaign
def test_every_snippet_of_the_empty_pages_runs_as_it_stands(empty: httpx.Client, tmp_path: Path) -> None:
    shown = {address: _snippets(empty, address) for address in PAGES}
    plan, start, run = shown["/"]
    (profile,), (cluster,), (alias,) = shown["/profiles"], shown["/clusters"], shown["/aliases"]
    assert shown["/runs"] == [start, run]
    assert shown["/agents"] == [start]
    assert shown["/jobs"][0] == start

    _ran(plan, tmp_path)
    (made,) = empty.get("/v1/plans").json()["items"]
    job, by_hand, named = _snippets(empty, f"/plans/{made['id']}")
    assert json.loads(_ran(profile, tmp_path).splitlines()[-1])["model"] == "mlp"
    assert json.loads(_ran(cluster, tmp_path))["devices"] == 32
    _ran(alias, tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["id"] == made["id"]
    assert json.loads(_ran(job, tmp_path))["task"]["plan_id"] == made["id"]
    fetch, run_it = by_hand.rsplit("\n", 1)
    assert json.loads(_ran(f"{fetch}\ncat plan.json", tmp_path))["model"]["name"] == "mlp"
    assert run_it.startswith("pipeplan-agent run --plan plan.json ")
    _ran(named, tmp_path)
    assert empty.get("/v1/aliases/prod").json()["plan_id"] == made["id"]
    assert json.loads(_ran(shown["/jobs"][1], tmp_path))["task"]["kind"] == "profile"
    assert json.loads(_ran(run, tmp_path))["task"]["plan_id"] == made["id"]


def test_the_agent_that_a_page_tells_to_start_serves_that_very_service(empty: httpx.Client, tmp_path: Path) -> None:
    (start,) = _snippets(empty, "/agents")
    for job in empty.get("/v1/jobs?state=queued").json()["items"]:
        empty.post(f"/v1/jobs/{job['id']}/cancel", json={}).raise_for_status()
    agent = _shell(f"exec {start}", tmp_path)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not empty.get("/v1/agents").json()["items"]:
            assert agent.poll() is None, agent.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
    finally:
        agent.terminate()
        agent.communicate()


def test_the_commands_beside_the_form_send_a_token_where_one_is_needed(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    database = tmp_path_factory.mktemp("guarded") / "service.sqlite3"
    made = pipeplan("token", "create", "--name", "ada", "--scope", "plan", "--database", f"sqlite:///{database}")
    token = made.stdout.strip()
    with (
        served(database, PIPEPLAN_REQUIRE_TOKENS="true") as url,
        httpx.Client(
            base_url=url, timeout=PATIENCE_S, trust_env=False, headers={"Authorization": f"Bearer {token}"}
        ) as client,
    ):
        (cluster,) = _snippets(client, "/clusters")
        assert json.loads(_ran(cluster, tmp_path, PIPEPLAN_TOKEN=token))["devices"] == 32
        asked = "planner=auto&batch_size=8&cluster_id=dgx-h100&model=hf:gpt2"
        command, curl = _snippets(client, f"/plans/new?{asked}")
        assert json.loads(_ran(curl, tmp_path, PIPEPLAN_TOKEN=token))["task"]["kind"] == "estimate"
        assert f"--url {url}" in command
