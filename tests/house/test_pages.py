"""What README and docs/ say is so: every command and block of code runs, every link leads somewhere, what is made of
the code is today's.

A page's commands run in order, in one folder for all pages, with one service for all of them. `SMALLER` makes their
models small; `NOT_RUN` names what cannot run here, with the reason.
"""

import faulthandler
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

from pipeplan.cli.reference import written
from pipeplan.client.client import Client
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import load
from pipeplan.documents.profile import Profile
from pipeplan.protocol.plans import PlanRequest
from tests.house.pages import DECISIONS, DOCS, FIGURED, GENERATED, ROOT, Fence, fences, figures, index, pages
from tests.pipeplan.cli.commands import PROFILES, cluster_document, pipeplan, profile_document, write
from tests.planner_service.servers import served
from worker_agent.profiler.datasheets import find_datasheet

HUNG_S = 400
"""When a command counts as hung: `faulthandler_timeout`."""

SERVED = "runs until it is interrupted: the tests of the service and of the agent start it"
DOCKER = "needs Docker, or images that are built: tests/docker checks the files"
CLUSTER = "needs a cluster: tests/docker checks the files, and that these commands name what is in them"
NOT_RUN = {
    "pipeplan serve": SERVED,
    "pipeplan serve --database sqlite:///restored.sqlite3": SERVED,
    "PIPEPLAN_BASE_PATH=/pipeplan PIPEPLAN_ALLOWED_HOSTS=plans.example.org pipeplan serve": SERVED,
    "pipeplan db restore pipeplan-20260131T120000Z.sqlite3 --database sqlite:///restored.sqlite3": "test_backups does",
    "pipeplan serve --host 0.0.0.0": SERVED,
    "pipeplan-agent start": SERVED,
    "pipeplan-agent start --allow mymodels:gpt --models-dir /models": SERVED,
    "pipeplan plan create --model 'hf:gpt2?n_layer=12' --cluster dgx-a100:2 --batch-size 64": (
        "waits for an agent: tests/planner_service/plans asks for such plans"
    ),
    "docker/make-secrets.sh": DOCKER,
    "docker compose build": DOCKER,
    "docker compose run --rm migrate": DOCKER,
    "docker compose run --rm migrate token create --name admin --scope admin --scope read --scope plan": DOCKER,
    "docker compose run --rm -T migrate token create --name agent --scope agent --expires never '>'"
    " secrets/agent_token": DOCKER,
    "docker compose up -d": DOCKER,
    "kubectl apply -f docker/kubernetes/namespace.yaml": CLUSTER,
    "kubectl create secret generic pipeplan-database -n pipeplan --from-file=secrets/postgres_password"
    " --from-file=secrets/database_url": CLUSTER,
    "kubectl create secret tls pipeplan-tls -n pipeplan --cert=plans.crt --key=plans.key": CLUSTER,
    "kubectl apply -f docker/kubernetes/network.yaml -f docker/kubernetes/postgres.yaml -f"
    " docker/kubernetes/console.yaml": CLUSTER,
    "kubectl rollout status statefulset/postgres -n pipeplan": CLUSTER,
    "kubectl wait pod/console -n pipeplan --for=condition=Ready": CLUSTER,
    "kubectl exec console -n pipeplan -- pipeplan db upgrade": CLUSTER,
    "kubectl exec console -n pipeplan -- pipeplan token create --name admin --scope admin --scope read"
    " --scope plan": CLUSTER,
    "kubectl exec console -n pipeplan -- pipeplan token create --name agent --scope agent --expires never"
    " '>' secrets/agent_token": CLUSTER,
    "kubectl create secret generic pipeplan-agent -n pipeplan --from-file=secrets/agent_token": CLUSTER,
    "kubectl delete pod console -n pipeplan": CLUSTER,
    "kubectl apply -f docker/kubernetes/service.yaml -f docker/kubernetes/agent.yaml": CLUSTER,
}

MODEL = "preset:mlp?width=8&depth=4"
SMALLER = {
    "hf:gpt2?n_layer=12": MODEL,
    "--planner auto --batch-size 64": "--planner auto --batch-size 8",
    "--planner pipedream-2bw --batch-size 64": "--planner pipedream-2bw --batch-size 8",
    "--steps 1000": "--steps 4",
    "--steps 2000": "--steps 6",
    "--checkpoint-every 100": "--checkpoint-every 2",
    "dgx-h100:32 --batch-size 1024 --sequence-length 8192": "dgx-h100:1 --batch-size 8 --sequence-length 64",
    "dgx-h100:4 --batch-size 512 --sequence-length 8192": "dgx-h100:1 --batch-size 8 --sequence-length 64",
    "--batch-size 16 --sequence-length 512": "--batch-size 8 --sequence-length 64",
}
"""What stands for a long run or a large model, in its place."""

DATA = """from worker_agent.models.presets import regression


def batches(*, microbatch_size, seed):
    return regression(microbatch_size=microbatch_size, seed=seed, width=8)
"""
CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 8,
    "n_positions": 64,
    "vocab_size": 64,
}
ORDER = ("quickstart.md", "README.md", "models.md", "planning.md")
"""These pages come first, in this order: they write what others read."""


def blocks() -> list[Fence]:
    """Every block that is written by hand, in the order in which they run."""
    places = {name: place for place, name in enumerate(ORDER)}
    ordered = sorted(pages(), key=lambda path: places.get(path.name, len(ORDER)))
    return [fence for path in ordered if path.name not in GENERATED for fence in fences(path)]


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Path]:
    """A folder with what pages assume to be there, as the current one, and a service that commands ask."""
    folder = tmp_path / "workshop"
    (folder / "docs" / "figures").mkdir(parents=True)
    shutil.copy(PROFILES / "vgg16.graph.txt", folder)
    (folder / "mydata.py").write_text(DATA, encoding="utf-8")
    waves = next(fence for fence in fences(DOCS / "schedules.md") if fence.language == "python")
    (folder / "waves.py").write_text(waves.text, encoding="utf-8")
    write(folder / "config.json", CONFIG)
    devices = {name: {"name": name, "memory_bytes": 10**9} for name in ("A", "B")}
    for name, device in devices.items():
        write(folder / {"A": "a100.json", "B": "v100.json"}[name], profile_document(4) | {"device": device})
    groups = [{"device": device, "count": 1} for device in devices.values()]
    write(folder / "mixed.json", {"groups": groups, "levels": cluster_document()["levels"]})
    with pytest.MonkeyPatch.context() as patched, served(folder / "service.sqlite3") as url:
        patched.chdir(folder)
        patched.setenv("PIPEPLAN_URL", url)
        patched.setenv("PIPEPLAN_DATABASE_URL", f"sqlite:///{folder / 'service.sqlite3'}")
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.mark.campaign
@pytest.mark.parametrize("named", [ORDER[:1], None], ids=["quickstart", "all pages"])
def test_every_command_and_every_block_of_code_runs(named: tuple[str, ...] | None, workshop: Path) -> None:
    done, pages_seen = set[str](), set[str]()
    for fence in blocks():
        if named is not None and fence.page not in named:
            continue
        if (workshop / "trained").exists() and not (workshop / "P.json").exists():
            assume(workshop)
        if fence.page not in ("quickstart.md", *pages_seen):
            pages_seen.add(fence.page)
            begin(fence.page, workshop)
        if fence.language == "python" and fence.page != "schedules.md":
            with redirect_stdout(io.StringIO()):
                exec(compile(fence.text, fence.page, "exec"), {"__name__": "page"})
        for command in fence.commands if fence.language == "sh" else ():
            if command in NOT_RUN or command in done:
                continue
            done.add(command)
            for long, short in SMALLER.items():
                command = command.replace(long, short)
            run(with_ids(command, workshop), fence.page)


def run(command: str, page: str) -> None:
    """Runs a command. Agents and schedules of one's own have processes of their own; others need none.

    Each has as long as other tests have for all that they do: together, on a busy machine, they take longer.
    """
    faulthandler.dump_traceback_later(HUNG_S, exit=True, file=sys.__stderr__ or sys.stderr)
    program, *arguments = shlex.split(command)
    assert program in ("pipeplan", "pipeplan-agent"), f"{page}: {command}: neither run nor in NOT_RUN"
    if program == "pipeplan" and "waves" not in command:
        ended = pipeplan(*arguments)
        assert ended.status == 0, f"{page}: {command}: {ended.err}"
        return
    module = {"pipeplan": "pipeplan.cli.app", "pipeplan-agent": "worker_agent.cli"}[program]
    words = [sys.executable, "-c", f"from {module} import main; main()", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{page}: {command}: {done.stderr}"


def begin(page: str, folder: Path) -> None:
    """Before a page after the first: the first page's files are back, but for the run of a page that makes it."""
    for source, copy in (("P.json", "profile.json"), ("C.json", "cluster.json")):
        shutil.copy(folder / source, folder / copy)
    for made in ("run1", "trained"):
        shutil.rmtree(folder / made, ignore_errors=True)
    if page not in ("README.md", "models.md"):
        shutil.copytree(folder / "run2", folder / "run1")


def assume(folder: Path) -> None:
    """What further blocks assume: the measured profile under other names, a second run, a service's plan."""
    for source, copy in (("profile.json", "P.json"), ("cluster.json", "C.json")):
        shutil.copy(folder / source, folder / copy)
    shutil.copytree(folder / "run1", folder / "run2")
    with Client() as service:
        profile = service.create_profile(load(Profile, folder / "P.json"))
        cluster = service.create_cluster(load(Cluster, folder / "C.json"))
        request = PlanRequest(profile_id=profile.id, cluster_id=cluster.id, planner="pipedream-2bw", batch_size=8)
        plan_id = service.create_plan(request, wait_s=60).plan_id
        assert plan_id is not None
        service.set_alias("gpt-prod", plan_id)
    write(folder / "ids.json", {"--profile ID": profile.id, "--cluster ID": cluster.id, "PLAN_ID": plan_id})


def with_ids(command: str, folder: Path) -> str:
    """The command with the service's own ids, where the page has words for them."""
    file = folder / "ids.json"
    for word, known in (json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}).items():
        option = word.partition(" ")[0] if word.startswith("--") else ""
        command = command.replace(word, f"{option} {known}".strip())
    return command


def test_what_is_not_run_and_what_is_made_smaller_stands_on_some_page() -> None:
    commands = [command for fence in blocks() if fence.language == "sh" for command in fence.commands]
    assert set(NOT_RUN) <= set(commands)
    assert [long for long in SMALLER if not any(long in command for command in commands)] == []


def test_every_block_says_what_it_is_and_no_text_hides_a_command() -> None:
    for fence in blocks():
        match fence.language:
            case "json":
                json.loads(fence.text)
            case "toml":
                tomllib.loads(fence.text)
            case "yaml":
                yaml.safe_load(fence.text)
            case "text":
                assert not re.search(r"^\$? ?pipeplan(-agent)? ", fence.text, re.MULTILINE), fence
            case _:
                assert fence.language in ("sh", "python"), fence


def test_the_documents_on_the_planning_page_are_valid(tmp_path: Path) -> None:
    cluster, datasheet = (fence.text for fence in fences(DOCS / "planning.md") if fence.language == "json")
    for name, text in (("datasheet.json", datasheet), ("cluster.json", cluster)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert find_datasheet(str(tmp_path / "datasheet.json")).name == "A100"
    assert load(Cluster, tmp_path / "cluster.json").devices == 32


def test_links_lead_to_files_and_headings() -> None:
    for path in [*pages(), *DECISIONS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if re.match(r"https?:", target):
                continue
            name, _, heading = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            assert file.exists(), f"{path.name}: {target}"
            assert not heading or heading in headings(file), f"{path.name}: {target}"


def headings(path: Path) -> set[str]:
    """A page's anchors, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140


WORD_LIMITS = {DOCS / "benchmarks.md": 3500, ROOT / "CHANGELOG.md": 1500}
"""Pages that grow with every change, and how long they may be."""


def word_count(path: Path) -> int:
    """How many words a page has, as `wc -w` counts them."""
    return len(path.read_text(encoding="utf-8").split())


def test_pages_that_grow_with_every_change_stay_short() -> None:
    assert {path.name: word_count(path) for path, limit in WORD_LIMITS.items() if word_count(path) > limit} == {}
    decisions = list(DECISIONS.glob("[0-9]*.md"))
    assert len(decisions) <= 40
    assert {path.name: word_count(path) for path in decisions if word_count(path) > 320} == {}
    rows = re.findall(r"^\| (?!term |-)", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 0 < len(rows) <= 40


def test_no_page_for_users_leads_to_a_decision() -> None:
    for path in pages():
        linked = "decisions/" in path.read_text(encoding="utf-8")
        assert not linked or path.name == "architecture.md", path.name


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        linked = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8"))
        found = {(page.parent / name).resolve() for name in linked}
        waiting += found - reached - set(waiting)
    assert {*pages(), *DECISIONS.glob("*.md")} <= reached


def test_the_commands_page_is_todays() -> None:
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == written(), "python -m tests.house.pages"


def test_the_index_of_the_decisions_is_todays() -> None:
    assert (DECISIONS / "README.md").read_text(encoding="utf-8") == index(), "python -m tests.house.pages"


def test_the_figures_are_what_the_simulator_draws_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in FIGURED)
    shown = re.findall(r"\]\((figures/.*\.svg)\)", text)
    assert [f"docs/{name}" for name in shown] == list(figures())
    for figure, command in figures().items():
        assert pipeplan(*shlex.split(command)[1:]).status == 0
        drawn = (tmp_path / figure).read_text(encoding="utf-8")
        assert drawn == (ROOT / figure).read_text(encoding="utf-8"), "python -m tests.house.pages"
