"""Hostile documents over HTTP: a text is refused at its field, or every artefact that holds it reads back as that text.

Shells run what pages and exports tell people to run, with programs in place of curl and pipeplan that write down their
arguments. Nothing else is executed. `tests/pipeplan/exports/test_hostile.py` has the exports of other plans.
"""

import csv
import html
import io
import json
import re
import subprocess
import unicodedata
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from xml.etree import ElementTree

import pytest
import yaml
from fastapi.testclient import TestClient

from pipeplan.documents.names import on_one_line
from planner_service.overview.openapi import BODIES, CLUSTER, PROFILE
from tests.planner_service.html_pages import Page

pytestmark = pytest.mark.campaign

CANARY = "canary"
TEXTS = (
    f"$(touch {CANARY})`touch {CANARY}`${{IFS}}",
    f"'; touch {CANARY}; '\"; touch {CANARY}; \"",
    "{{ 7*7 }}{% raw %}{# x #}<%= 7*7 %>",
    '<script>alert(1)</script>"><img src=x onerror=alert(1)>]]><!--',
    "&lt;script&gt; &amp;amp; &#x27;",
    "!!python/object/apply:os.system ['true']",
    "&anchor *alias <<: [a, {b: c}] # comment",
    "--- |",
    "yes",
    "=1+1",
    "@SUM(A1)",
    "+1|cmd' /C calc'!A0",
    "-1+2",
    "'=1+1",
    "  =1+1",
    "\N{FULLWIDTH EQUALS SIGN}1+1",
    "\N{IDEOGRAPHIC SPACE}\N{FULLWIDTH PLUS SIGN}1",
    "a --url=http://evil.example",
    "a,b;c\td".replace("\t", " "),
    "../../../etc/passwd",
    "C:\\windows\\%PATH%\\",
    "--url=http://evil.example",
    "\\u0000 \\x1b[2J \\n",
    "'''\"\"\"",
    "EOF",
    "\u202egnp.exe\u2066",
    "x\N{COMBINING GRAPHEME JOINER}\N{GRINNING FACE}é",
)
"""Texts of one line, all printable: names."""

REFUSED = ("a\nb", "a\rb", "a\x00b", "a\x1b[31mb", "a\u2028b", "a\x85b", "a\x7fb")
"""Texts that would not print as one line, or print as another one."""

SURROGATES = (r"\ud800", r"a\udfff", r"\udc00\ud800")

NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" + "0" * 400, "-0", "-0.0", "-1", "0", '"1"', "true")

DEEP = 100_000
JSON = {"Content-Type": "application/json"}
HTML = {"Accept": "text/html"}
STAND_INS = ("curl", "pipeplan", "pipeplan-agent")


def _named(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A profile and a cluster in which everything that has a free name has this one."""
    profile, cluster = asdict(PROFILE), asdict(CLUSTER)
    for index, block in enumerate(profile["blocks"]):
        block["name"] = f"{text}{index}"
    for named in (profile["model"], profile["device"], cluster["device"]):
        named["name"] = text
    return profile, cluster


def _stored(http: TestClient, text: str, spec: str | None = None) -> tuple[str, str, str]:
    """The ids of a profile, a cluster and a plan with this name in them."""
    profile, cluster = _named(text)
    if spec is not None:
        profile["model"]["spec"] = spec
    ids = [
        http.post(f"/v1/{noun}", json=document).raise_for_status().json()["id"]
        for noun, document in (("profiles", profile), ("clusters", cluster))
    ]
    asked = {"profile_id": ids[0], "cluster_id": ids[1], "planner": "pipedream-2bw", "batch_size": 16}
    made = http.post("/v1/plans", json=asked | {"options": {"optimizer": "adam"}}).raise_for_status()
    return ids[0], ids[1], made.json()["id"]


def _shell(script: str, folder: Path) -> list[list[str]]:
    """The arguments of each of our programs that the script starts."""
    for name in STAND_INS:
        (folder / name).write_text(f'#!/bin/bash\nprintf "%s\\0" {name} "$@" >> calls\nprintf "\\1\\0" >> calls\n')
        (folder / name).chmod(0o755)
    (folder / "calls").write_text("")
    (folder / "script.sh").write_text(script, encoding="utf-8")
    for options in (["-n"], []):
        done = subprocess.run(
            ["bash", *options, "script.sh"],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={"PATH": f"{folder}:/usr/bin:/bin", "TMPDIR": str(folder), "DATA": "preset:random_tokens", "STEPS": "3"}
            | {"OUT": str(folder / "out"), "PIPEPLAN_TOKEN": "t"},
        )
        assert done.returncode == 0, (script, done.stderr)
    calls = (folder / "calls").read_text(encoding="utf-8").split("\1\0")
    return [call.split("\0")[:-1] for call in calls if call]


def _snippets(page: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)]


def _page(http: TestClient, path: str) -> str:
    text = http.get(path, headers=HTML).raise_for_status().text
    read = Page(text)
    handlers = [attribute for attribute in read.attributes if attribute[1].startswith("on")]
    assert handlers == []
    assert all(urlsplit(address).netloc == "" for address in [*read.links, *read.loaded])
    return text


@pytest.mark.parametrize("text", TEXTS)
def test_every_export_reads_back_as_the_text(http: TestClient, text: str, tmp_path: Path) -> None:
    _, _, plan_id = _stored(http, text)

    def export(name: str) -> str:
        return http.get(f"/v1/plans/{plan_id}/exports/{name}").raise_for_status().text

    document = http.get(f"/v1/plans/{plan_id}").raise_for_status()
    assert document.json()["model"]["name"] == text

    (call,) = _shell(export("torchrun"), tmp_path)
    assert call[:3] == ["pipeplan-agent", "run", "--plan"]
    assert call[call.index("--model") + 1] == PROFILE.model.spec
    kinds = list(yaml.safe_load_all(export("kubernetes")))
    assert json.loads(kinds[0]["data"]["plan.json"])["model"]["name"] == text
    assert _shell(export("megatron"), tmp_path) == []
    json.loads(export("deepspeed"))
    json.loads(export("chrome-trace"))
    assert not (tmp_path / CANARY).exists()


@pytest.mark.parametrize("text", TEXTS)
def test_every_page_shows_the_text_and_every_command_on_it_is_its_own(
    http: TestClient, text: str, tmp_path: Path
) -> None:
    profile_id, cluster_id, plan_id = _stored(http, text)
    asked = f"profile_id={profile_id}&cluster_id={cluster_id}&planner=gpipe&batch_size=16"
    paths = (f"/profiles/{profile_id}", f"/clusters/{cluster_id}", f"/plans/{plan_id}", f"/plans/new?{asked}")
    for path in (*paths, "/", "/profiles", "/clusters", "/plans"):
        page = _page(http, path)
        if path in paths[:3]:
            assert text in html.unescape(page)
        for snippet in _snippets(page):
            _shell(snippet, tmp_path)
    assert not (tmp_path / CANARY).exists()


SPECS = (
    'hf:gpt2?n_layer=4&name="},{"kind":"profile',
    "hf:gpt2?name='$(touch${IFS}canary)'",
    "hf:gpt2?name=`touch${IFS}canary`\\",
    "mine.models:gpt?a=<script>&b=x{{7*7}}&c=%22",
)


@pytest.mark.parametrize("spec", SPECS)
def test_the_commands_of_a_plans_page_send_its_model_as_it_is(http: TestClient, spec: str, tmp_path: Path) -> None:
    _, _, plan_id = _stored(http, "model", spec)
    calls = [call for snippet in _snippets(_page(http, f"/plans/{plan_id}")) for call in _shell(snippet, tmp_path)]
    sent = [json.loads(call[call.index("-d") + 1]) for call in calls if "-d" in call]
    assert [(one["kind"], one["plan_id"], one["model"]) for one in sent] == [("run", plan_id, spec)]
    runs = [call for call in calls if call[0] == "pipeplan-agent"]
    assert [call[call.index("--model") + 1] for call in runs] == [spec]
    assert not (tmp_path / CANARY).exists()


@pytest.mark.parametrize("spec", SPECS)
def test_the_commands_beside_the_form_send_what_was_entered(http: TestClient, spec: str, tmp_path: Path) -> None:
    page = _page(http, f"/plans/new?planner=auto&batch_size=8&cluster_id=dgx-h100&model={quote(spec)}")
    calls = [call for snippet in _snippets(page) for call in _shell(snippet, tmp_path)]
    assert len(calls) == 2
    for call in calls:
        sent = json.loads(call[call.index("-d") + 1])["model"] if call[0] == "curl" else call
        assert spec in (
            sent if isinstance(sent, list) else [sent, sent.get("spec") if isinstance(sent, dict) else None]
        )
    assert not (tmp_path / CANARY).exists()


@pytest.mark.parametrize("text", TEXTS)
def test_tables_read_back_as_the_text_and_no_cell_is_a_formula(http: TestClient, text: str) -> None:
    profile_id, _, plan_id = _stored(http, text)
    described = http.get("/openapi.json").json()["paths"]
    told: set[str] = set()
    for path, of in (
        ("/v1/profiles/{profile_id}/charts/{chart}.{kind}", profile_id),
        ("/v1/plans/{plan_id}/charts/{chart}.{kind}", plan_id),
    ):
        (chart,) = (one for one in described[path]["get"]["parameters"] if one["name"] == "chart")
        for name in chart["schema"]["enum"]:
            stem = re.sub(r"\{(profile|plan)_id\}", of, path).replace("{chart}", name)
            ElementTree.fromstring(http.get(stem.replace("{kind}", "svg")).raise_for_status().text)
            table = http.get(stem.replace("{kind}", "csv")).raise_for_status().text
            rows = list(csv.reader(io.StringIO(table, newline="")))
            assert len({len(row) for row in rows}) == 1
            cells = [cell for row in rows for cell in row]
            read = [unicodedata.normalize("NFKC", cell).lstrip() for cell in cells]  # as some spreadsheets do
            assert not [cell for cell in read if cell.startswith(("=", "+", "@"))], cells
            plain = [cell.removeprefix("'") for cell in cells]
            assert all(re.match(r"-[\d.]+(e-?\d+)?$", cell) for cell in cells if cell.startswith("-")), cells
            told.update(plain)
    assert {f"{text}{index}" for index in range(len(PROFILE.blocks))} <= told


def test_what_does_not_print_as_one_line_is_refused_at_its_field(http: TestClient) -> None:
    for text in REFUSED:
        for noun, document in zip(("profiles", "clusters"), _named(text), strict=True):
            answer = http.post(f"/v1/{noun}", json=document)
            assert answer.status_code == 422, (text, answer.text)
            (error,) = answer.json()["errors"]
            assert set(error) == {"field", "rule", "value"}
            assert error["field"].split(".")[0] in ("model", "device", "blocks", "document")
    for text in SURROGATES:
        body = json.dumps(_named("NAME")[0]).replace("NAME", text)
        answer = http.post("/v1/profiles", content=body, headers=JSON)
        assert (answer.status_code, len(answer.json()["errors"])) == (422, 1)


@pytest.mark.parametrize("name", [*TEXTS, *REFUSED])
def test_an_alias_is_refused_or_its_pages_commands_name_it(http: TestClient, name: str, tmp_path: Path) -> None:
    _, _, plan_id = _stored(http, "model")
    answer = http.put(f"/v1/aliases/{quote(name, safe='')}", json={"plan_id": plan_id})
    assert answer.status_code in (200, 201, 404, 422), answer.text
    if answer.status_code >= 400:
        return
    for snippet in _snippets(_page(http, f"/aliases/{quote(name)}")):
        for call in _shell(snippet, tmp_path):
            (address,) = (word for word in call if word.startswith("http"))
            assert unquote(urlsplit(address).path) == f"/v1/aliases/{name}/plan"


def _bodies() -> list[tuple[str, str]]:
    """What is no document anywhere, by name."""
    many = json.dumps({"x": [0] * 100_000})
    return [
        ("deep lists", "[" * DEEP + "]" * DEEP),
        ("deep objects", '{"a":' * 5_000 + "1" + "}" * 5_000),
        ("one key twice", '{"kind": "links", "kind": "run", "token": "a", "token": "b", "name": "a", "name": "b"}'),
        ("an enormous list", many),
        ("an enormous text", json.dumps({"x": "y" * 60_000})),
        *((f"the number {number[:12]}", f'{{"x": {number}}}') for number in NUMBERS),
        *((f"the text {text!r}", json.dumps({"x": text})) for text in REFUSED),
        *((f"the text {text}", f'{{"x": "{text}"}}') for text in SURROGATES),
        *((f"the key {text!r}", json.dumps({text: 1})) for text in REFUSED),
        *((f"the kind {text!r}", json.dumps({"kind": text})) for text in REFUSED),
        *((f"the kind {text!r} of a result", json.dumps({"token": "t", "result": {"kind": text}})) for text in REFUSED),
        ("no UTF-8", "\udcff"),
    ]


@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_route_refuses_what_is_no_document_with_one_problem(http: TestClient, path: str) -> None:
    method = "PUT" if "aliases" in path else "POST"
    address = re.sub(r"\{\w+\}", "0" * 32, path)
    for name, body in _bodies():
        answer = http.request(method, address, content=body.encode("utf-8", "surrogateescape"), headers=JSON)
        assert 400 <= answer.status_code < 500, (name, answer.status_code, answer.text[:300])
        assert answer.headers["content-type"] == "application/problem+json", name
        assert len(answer.content) < 4_000, name
        problem = answer.json()
        assert problem["detail"] == on_one_line(problem["detail"]), name
        if answer.status_code == 422:
            assert problem["errors"], name
            assert all(set(error) == {"field", "rule", "value"} for error in problem["errors"]), (name, problem)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_refused_at_its_field_or_kept_as_it_is(http: TestClient, number: str) -> None:
    profile, cluster = _named("model")
    cluster["levels"][0]["latency_s"] = profile["blocks"][0]["measurements"][0]["forward_s"] = "NUMBER"
    for noun, document, field in (("clusters", cluster, "levels.0.latency_s"), ("profiles", profile, "forward_s")):
        body = json.dumps(document).replace('"NUMBER"', number)
        answer = http.post(f"/v1/{noun}", content=body, headers=JSON)
        if answer.status_code == 422:
            (error,) = answer.json()["errors"]
            assert error["field"].endswith(field) or error["field"] == "document", error
            continue
        assert answer.status_code == 201, answer.text
        kept = http.get(f"/v1/{noun}/{answer.json()['id']}").json()
        kept_number = kept["levels"][0] if noun == "clusters" else kept["blocks"][0]["measurements"][0]
        assert kept_number[field.split(".")[-1]] == float(number) == abs(float(number))
