"""The form that makes a plan: the API's request and its checks, the commands beside it, and the example."""

import html
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import typer
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from pipeplan.cli.solve import takes_options
from pipeplan.documents.files import dump
from pipeplan.planners.problem import Options
from planner_service.overview.openapi import CLUSTER, PLAN_REQUEST, PROFILE
from planner_service.plans import asking, example
from planner_service.platform.context import Context
from tests.planner_service.examples import store_plan
from tests.planner_service.html_pages import Page
from tests.planner_service.servers import environment, served
from tests.waiting import PATIENCE_S

HTML = {"Accept": "text/html"}
OWN = {"Origin": "http://127.0.0.1", **HTML}
ASKED = {
    "profile_id": PLAN_REQUEST.profile_id,
    "cluster_id": PLAN_REQUEST.cluster_id,
    "planner": "pipedream-2bw",
    "batch_size": "16",
}
PUBLIC = Path("tests/data/profiles/vgg16.graph.txt")

GIVEN: dict[str, tuple[str, Any]] = {
    "microbatch_size": ("2", 2),
    "schedule": ("1f1b", "1f1b"),
    "stages": ("2", 2),
    "chunks": ("3", 3),
    "recompute": ("true", True),
    "recompute_unit": ("stage", "stage"),
    "synchronisation": ("all-reduce", "all-reduce"),
    "memory": ("paper", "paper"),
    "optimizer": ("adamw", "adamw"),
    "recompute_factor": ("1.5", 1.5),
    "safe_batch": ("true", True),
    "master_weights": ("false", False),
    "semantics": ("paper", "paper"),
    "compression_ratio": ("2", 2),
    "straight": ("true", True),
    "fewer_machines": ("true", True),
    "cuts": ("any", "any"),
    "forced_cuts": ("1, 3", (1, 3)),
    "forbidden_cuts": ("2", (2,)),
    "split_backward": ("true", True),
    "split_backward_half_way": ("true", True),
    "time_limit_s": ("0.5", 0.5),
    "as_if": ("true", True),
    "engine": ("megatron", "megatron"),
    "tensor": ("2", 2),
    "sequence_parallel": ("false", False),
    "context": ("2", 2),
    "expert": ("2", 2),
    "expert_tensor": ("1", 1),
    "data": ("2", 2),
    "sharding": ("optimizer", "optimizer"),
    "offload": ("optimizer", "optimizer"),
    "replicate": ("2", 2),
    "graphs": ("true", True),
    "a2a_overlap": ("true", True),
    "offload_share": ("0.5", 0.5),
    "synchronous": ("true", True),
}
"""Every option of a request: what a person enters, and what that is."""


def _sent(http: TestClient, fields_: dict[str, str], headers: dict[str, str] = OWN) -> Any:
    return http.post("/plans/new", data=fields_, headers=headers, follow_redirects=False)


def _snippets(page: str) -> list[str]:
    """The commands that a page shows, as somebody copies them."""
    return [html.unescape(text) for text in re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)]


def test_every_option_of_a_request_is_a_field_with_a_label(http: TestClient, context: Context) -> None:
    store_plan(context)
    page = Page(http.get("/plans/new", headers=HTML).text)
    form = next(form for form in page.forms if form.action == "/plans/new")
    asked = {
        "profile_id",
        "cluster_id",
        "planner",
        "batch_size",
        "model",
        "sequence_length",
        "dtype",
        "precision",
        "other_profile_ids",
    }
    assert {name for name in form.fields if name} == asked | {field.name for field in fields(Options)}
    assert not page.unlabelled


def test_every_option_is_explained_and_offers_its_default_once() -> None:
    """The form offered the engine pipeplan twice, and did not say what an option such as As if is."""
    assert asking.HINTS.keys() == {field.name for field in fields(Options)}
    assert asking.LABELS.keys() <= asking.HINTS.keys()
    for option in asking.options():
        texts = [option.default, *(text for _, text in option.choices)]
        assert len(set(texts)) == len(texts), option.name


def test_the_test_knows_every_option() -> None:
    assert GIVEN.keys() == {field.name for field in fields(Options)}


@pytest.mark.parametrize("name", GIVEN)
def test_an_option_means_the_same_in_the_form_in_the_command_and_in_the_api(name: str) -> None:
    text, value = GIVEN[name]
    document = asking.document_of({**ASKED, name: f" {text} "})
    got = document["options"][name]
    assert (tuple(got) if isinstance(got, list) else got) == value

    app, seen = typer.Typer(), []

    @app.command()
    @takes_options
    def create(
        options: Options, url: str = "", profile: str = "", cluster: str = "", planner: str = "", batch_size: int = 0
    ) -> None:
        seen.append((options, url, profile, cluster, planner, batch_size))

    command = shlex.split(asking.command_of(document, "http://host:1").replace("\\\n", " "))
    result = CliRunner().invoke(app, command[3:])
    assert result.exit_code == 0, result.output
    same = (ASKED["profile_id"], ASKED["cluster_id"], "pipedream-2bw", 16)
    assert seen == [(Options(**{name: value}), "http://host:1", *same)]


def test_a_sent_form_gives_the_plan_that_the_api_gives(http: TestClient, context: Context) -> None:
    store_plan(context)
    answer = _sent(http, ASKED | {"optimizer": "adam", "model": "", "microbatch_size": " "})
    assert answer.status_code == 303, answer.text
    document = PLAN_REQUEST.model_dump(mode="json") | {"options": {"optimizer": "adam"}}
    same = http.post("/v1/plans", json=document)
    assert same.status_code == 200
    assert answer.headers["location"] == f"/plans/{same.json()['id']}"


def test_the_request_and_the_form_ask_for_training_as_one_process_does(http: TestClient, context: Context) -> None:
    store_plan(context)

    def asked(planner: str, **options: object) -> Any:
        return http.post(
            "/v1/plans", json=PLAN_REQUEST.model_dump(mode="json") | {"planner": planner, "options": options}
        )

    same = asked("auto", synchronous=True).json()
    assert (same["synchronous"], same["training"]) == (True, "trains as one process does")
    assert same["training"] in http.get(f"/plans/{same['id']}", headers=HTML).text
    sent = _sent(http, ASKED | {"planner": "auto", "synchronous": "true"})
    assert sent.headers["location"] == f"/plans/{same['id']}"

    refused = asked("auto", schedule="pipedream-2bw", synchronous=True)
    assert refused.status_code == 422
    assert refused.text.count("must be off for the schedule pipedream-2bw, whose gradients are of older weights") >= 1


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": "0"}, "batch_size: must be greater than or equal to 1, got 0"),
        ({"batch_size": "many"}, "batch_size: "),
        ({"batch_size": "9" * 400}, "batch_size: "),
        ({"batch_size": "9" * 5000}, "batch_size: "),
        ({"microbatch_size": "9" * 400}, "microbatch_size: "),
        ({"batch_size": ""}, "batch_size: "),
        ({"profile_id": "f" * 32}, "profile_id: must be the id of a stored profile"),
        ({"cluster_id": "dgx-h2000"}, "cluster_id: "),
        ({"optimizer": "best"}, "optimizer"),
        ({"recompute": "perhaps"}, "recompute"),
        ({"forced_cuts": "1 x"}, "forced_cuts"),
        ({"bogus": "1"}, "bogus"),
        ({"options": "schedule=gpipe"}, "options.options: "),
        ({"time_limit_s": "1e9"}, "options.time_limit_s: must be at most"),
    ],
)
def test_a_form_is_refused_as_the_api_refuses_and_keeps_what_was_entered(
    http: TestClient, context: Context, changes: dict[str, str], said: str
) -> None:
    store_plan(context)
    given = ASKED | changes
    checked = http.get(f"/plans/new?{urlencode(given)}", headers=HTML)
    sent = _sent(http, given)
    told = http.post("/v1/plans", json=asking.document_of(given)).json()["detail"]
    assert said in told
    assert (checked.status_code, sent.status_code) == (200, 422)
    for page in (checked.text, sent.text):
        assert f"Not yet: {told}" in Page(page).text
        for name, value in changes.items():
            if name in ("batch_size", "profile_id", "cluster_id", "forced_cuts", "time_limit_s"):
                assert f'name="{name}" value="{value}"' in page


def test_the_command_has_every_text_as_it_is() -> None:
    """A line was broken before every pair of dashes, in the middle of a text as well."""
    given = {"model": "a --b", "name --x": "--y --z", "options": " --o"}
    command = asking.command_of(asking.document_of(given), "http://127.0.0.1")
    assert shlex.split(command.replace("\\\n", ""))[5:] == [
        "--model",
        "a --b",
        "--name --x",
        "--y --z",
        "--options",
        "--o",
    ]


def test_what_does_not_go_together_shows_before_a_planner_is_asked(http: TestClient, context: Context) -> None:
    """The commonest mistake: the profile is of another type of device than the cluster."""
    store_plan(context)
    page = Page(http.get(f"/plans/new?{urlencode(ASKED | {'cluster_id': 'dgx-h100'})}", headers=HTML).text)
    assert "Not yet:" in page.text
    assert "H100" in page.text
    page = Page(http.get(f"/plans/new?{urlencode(ASKED | {'microbatch_size': '7'})}", headers=HTML).text)
    assert "Not yet: microbatch_size: must be one of the measured sizes [1, 2], or lie between them, got 7" in page.text


def test_what_a_planner_refuses_is_shown_with_what_was_entered(http: TestClient, context: Context) -> None:
    small = json.loads(dump(CLUSTER))
    small["device"]["memory_bytes"] = 2**20
    store_plan(context)
    cluster_id = http.post("/v1/clusters", json=small).json()["id"]
    answer = _sent(http, ASKED | {"cluster_id": cluster_id})
    assert answer.status_code == 200
    assert "No plan fits, because: too large" in Page(answer.text).text
    assert f'value="{cluster_id}"' in answer.text


@pytest.mark.each_case
@pytest.mark.parametrize("headers", [{}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
@pytest.mark.parametrize("address", ["/plans/new", "/example"])
def test_another_sites_page_makes_no_plan(
    http: TestClient, context: Context, headers: dict[str, str], address: str
) -> None:
    store_plan(context)
    before = http.get("/v1/plans").json()
    assert http.post(address, data=ASKED | {"batch_size": "48"}, headers=headers).status_code == 403
    assert http.get("/v1/plans").json() == before


def test_a_model_without_a_profile_becomes_a_job(http: TestClient) -> None:
    asked = {"model": "hf:gpt2?n_layer=2", "cluster_id": "dgx-h100", "planner": "auto", "batch_size": "16"}
    answer = _sent(http, asked)
    assert answer.status_code == 303
    job = http.get("/v1" + answer.headers["location"]).json()
    assert (job["task"]["kind"], job["task"]["request"]["model"]) == ("estimate", "hf:gpt2?n_layer=2")


def test_the_packaged_example_is_the_public_profile() -> None:
    assert example.GRAPH.read_bytes() == PUBLIC.read_bytes()
    assert "Microsoft" in (example.GRAPH.parent / "LICENSE.txt").read_text(encoding="utf-8")


def test_the_first_page_makes_the_example_with_one_click(http: TestClient) -> None:
    form = next(form for form in Page(http.get("/", headers=HTML).text).forms if form.action == "/example")
    answer = http.post(form.action, headers=OWN, follow_redirects=False)
    assert answer.status_code == 303
    page = http.get(answer.headers["location"], headers=HTML)
    assert page.status_code == 200
    assert "vgg16" in Page(page.text).text
    profile = http.get("/v1/profiles").json()["items"][0]
    assert (profile["model"], profile["blocks"]) == ("vgg16", 40)
    again = http.post(form.action, headers=OWN, follow_redirects=False)
    assert again.headers["location"] == answer.headers["location"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service of its own process with a profile and a cluster."""
    database = tmp_path_factory.mktemp("service") / "service.sqlite3"
    with served(database) as url, httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        client.post("/v1/profiles", json=asdict(PROFILE)).raise_for_status()
        client.post("/v1/clusters", json=asdict(CLUSTER)).raise_for_status()
        yield client


def _run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a snippet in a shell as it stands."""
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    changed = environment(PATH=scripts, NO_PROXY="*")
    return subprocess.run(
        ["bash", "-ec", command], capture_output=True, text=True, cwd=folder, env=changed, check=False
    )


def test_the_commands_beside_the_form_run_as_they_stand(service: httpx.Client, tmp_path: Path) -> None:
    given = ASKED | {"batch_size": "48", "optimizer": "adam", "recompute": "false"}
    page = service.get(f"/plans/new?{urlencode(given)}", headers=HTML).text
    by_command, by_curl = _snippets(page)
    made = json.loads(_run(by_curl, tmp_path).stdout)
    assert (made["batch_size"], made["optimizer"], made["feasible"]) == (48, "adam", True)
    ran = _run(f"{by_command} --json", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["id"] == made["id"]
    assert len(service.get("/v1/plans").json()["items"]) == 1
