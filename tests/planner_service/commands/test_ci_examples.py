"""The examples for CI, as they stand: their script lines are run with the real commands against a real service."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from pipeplan import Client, save
from pipeplan.documents.files import SAID
from planner_service.overview.openapi import CLUSTER, PLAN_REQUEST, PROFILE
from tests.planner_service.servers import environment, pipeplan, served

PRINTED = ("get gpt-prod --format env", "export gpt-prod --format torchrun")
EXAMPLES = Path(__file__).parents[3] / "examples" / "ci"


@dataclass(frozen=True)
class Project:
    """A repository's folder with a lock, and the variables that its pipelines see."""

    folder: Path
    variables: dict[str, str]
    url: str
    token: str

    def shell(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A script as a runner runs it."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        settings = environment(**self.variables, PATH=path, **variables)
        command = ["bash", "-eo", "pipefail", "-c", script]
        return subprocess.run(command, cwd=self.folder, env=settings, capture_output=True, text=True)

    def github(self) -> dict[str, subprocess.CompletedProcess[str]]:
        """How every step of the example for GitHub ends that has a script, all of them run."""
        workflow = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text(encoding="utf-8"))
        (job,) = workflow["jobs"].values()
        assert set(job["env"]) == set(self.variables), "what the job takes from the repository's variables and secrets"
        handed = self.folder / "github.env"
        handed.write_text("")
        ended = {}
        for step in job["steps"]:
            if "run" in step:
                variables = variables_in(handed.read_text())
                ended[step["name"]] = self.shell(step["run"], GITHUB_ENV=str(handed), **variables)
        return ended

    def gitlab(self) -> dict[str, subprocess.CompletedProcess[str]]:
        """How every job of the example for GitLab ends."""
        pipeline = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text(encoding="utf-8"))
        jobs = {name: job for name, job in pipeline.items() if isinstance(job, dict) and not name.startswith(".")}
        ended, handed = {}, dict[str, dict[str, str]]()
        for name, job in sorted(jobs.items(), key=lambda pair: pipeline["stages"].index(pair[1]["stage"])):
            whole = pipeline[job["extends"]] | job if "extends" in job else job
            lines = whole.get("before_script", []) + whole["script"]
            variables = {key: value for need in whole.get("needs", []) for key, value in handed[need].items()}
            ended[name] = self.shell("\n".join(lines), **variables)
            report = whole.get("artifacts", {}).get("reports", {}).get("dotenv")
            handed[name] = variables_in((self.folder / report).read_text()) if report else {}
        return ended


def variables_in(text: str) -> dict[str, str]:
    """Lines NAME=value, as GitHub and GitLab read them: quotes are part of the value."""
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose alias points at the locked plan."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "bin").mkdir()
    program = f"#!/bin/sh\nexec {sys.executable} -c 'from pipeplan.cli.app import main; main()' \"$@\"\n"
    for name, text in (("pipeplan", program), ("pip", '#!/bin/sh\necho "$@"\n')):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    save(PROFILE, folder / "profile.json")
    save(CLUSTER, folder / "cluster.json")

    database = folder / "service.sqlite3"
    tokens = {}
    for scope in ("plan", "read"):
        asked = ("token", "create", "--name", scope, "--scope", scope, "--database", f"sqlite:///{database}")
        tokens[scope] = pipeplan(*asked).stdout.strip()
    with served(database, PIPEPLAN_REQUIRE_TOKENS="true") as url:
        with Client(url, tokens["plan"]) as service:
            service.create_profile(PROFILE)
            service.create_cluster(CLUSTER)
            service.set_alias("gpt-prod", str(service.create_plan(PLAN_REQUEST).plan_id))
        variables = {"PIPEPLAN_URL": url, "PIPEPLAN_TOKEN": tokens["read"], "PIPEPLAN_PACKAGE": "pipeplan"}
        made = Project(folder, variables, url, tokens["plan"])
        assert made.shell("pipeplan lock gpt-prod").returncode == 0
        yield made


@pytest.mark.each_case
@pytest.mark.parametrize(("runner", "training"), [(Project.github, "Use it"), (Project.gitlab, "train")])
def test_all_is_well_while_nothing_has_changed(
    runner: Callable[[Project], dict[str, subprocess.CompletedProcess[str]]], training: str, project: Project
) -> None:
    lock = (project.folder / "pipeplan.lock").read_bytes()
    jobs = runner(project)
    for name, ended in jobs.items():
        assert ended.returncode == 0, (name, ended.stdout, ended.stderr)
    said = jobs[training].stdout
    with Client(project.url, project.token) as service:
        alias = service.alias("gpt-prod")
        schedule = service.plan(alias.plan_id).schedule
    assert said.count(alias.plan_id) == said.count(f"{schedule}, ") == 1
    assert project.shell("pipeplan lock gpt-prod").returncode == 0
    assert (project.folder / "pipeplan.lock").read_bytes() == lock, "the same alias gives the same lock"


@pytest.mark.skipif(not all(map(shutil.which, ("curl", "jq"))), reason="curl or jq is not installed")
def test_curl_and_jq_get_what_the_commands_get(project: Project) -> None:
    script = (EXAMPLES / "curl.sh").read_text(encoding="utf-8")
    ended = project.shell(script)
    assert ended.returncode == 0, ended.stderr
    made = {name: (project.folder / name).read_text(encoding="utf-8") for name in ("plan.json", "plan.env", "train.sh")}
    said = {name: project.shell(f"pipeplan plan {name}").stdout for name in ("get gpt-prod --json", *PRINTED)}
    spoken = json.loads(said["get gpt-prod --json"])
    assert json.loads(made["plan.json"]) | {key: spoken[key] for key in SAID} == spoken, "the command says more of it"
    assert variables_in(made["plan.env"]).items() <= variables_in(said[PRINTED[0]]).items()
    assert len(variables_in(made["plan.env"])) == 5
    assert made["train.sh"] == said[PRINTED[1]]

    with Client(project.url, project.token) as service:
        first = service.alias("gpt-prod").plan_id
        other = str(service.create_plan(PLAN_REQUEST.model_copy(update={"batch_size": 32})).plan_id)
        service.set_alias("gpt-prod", other)
        moved = project.shell(script)
        service.delete_alias("gpt-prod")
        gone = project.shell(script)
        service.set_alias("gpt-prod", first)
    assert (moved.returncode, moved.stderr) == (7, f"gpt-prod points at {other}, the lock holds {first}\n")
    assert gone.returncode == 1
    assert gone.stderr.endswith("there is no plan gpt-prod, nor an alias of that name\n")


@pytest.mark.campaign
def test_another_profile_fails_where_it_is_checked_alone(project: Project) -> None:
    heavier = replace(PROFILE.blocks[1], weight_bytes=2 * PROFILE.blocks[1].weight_bytes)
    changed = replace(PROFILE, blocks=(PROFILE.blocks[0], heavier, *PROFILE.blocks[2:]))
    save(changed, project.folder / "profile.json")
    try:
        steps, jobs = project.github(), project.gitlab()
    finally:
        save(PROFILE, project.folder / "profile.json")
    failed = [(name, ended) for name, ended in (*steps.items(), *jobs.items()) if ended.returncode]
    assert [name for name, _ in failed] == ["Check the lock against this branch's profile and cluster", "lock"]
    for _, ended in failed:
        assert ended.returncode == 7
        bytes_then, bytes_now = PROFILE.blocks[1].weight_bytes, heavier.weight_bytes
        assert f"~ {heavier.name}: weight_bytes: {bytes_then} -> {bytes_now} (+100.0 %)" in ended.stdout


@pytest.mark.campaign
def test_a_moved_alias_fails_where_it_is_asked_about_alone(project: Project) -> None:
    with Client(project.url, project.token) as service:
        first = service.alias("gpt-prod").plan_id
        other = service.create_plan(PLAN_REQUEST.model_copy(update={"batch_size": 32})).plan_id
        service.set_alias("gpt-prod", str(other))
        try:
            steps, jobs = project.github(), project.gitlab()
        finally:
            service.set_alias("gpt-prod", first)
    failed = [(name, ended) for name, ended in (*steps.items(), *jobs.items()) if ended.returncode]
    assert [name for name, _ in failed] == ["Check that the alias still points at the locked plan", "alias"]
    for _, ended in failed:
        assert ended.returncode == 7
        assert f"gpt-prod points at {other}" in ended.stdout
        assert "~ batch_size: 16 -> 32" in ended.stdout
    pipeline = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text(encoding="utf-8"))
    assert pipeline["alias"]["allow_failure"]["exit_codes"] == [7]
