"""Exports of documents that hold hostile texts: bash runs every one, and nothing that a text holds is executed.

Documents with such texts are refused where they come in. The writers must be safe all the same: the texts here are put
into the objects afterwards.
"""

import ast
import json
import os
import shlex
import subprocess
import tomllib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeplan.documents.cluster import Level
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Model
from pipeplan.exports.formats import FORMATS, format_named
from pipeplan.exports.source import ExportSource
from pipeplan.planners.problem import PlanningProblem
from planner_service.overview.openapi import CLUSTER, PROFILE
from tests.planner_service.answers import halve

CANARY = "touch canary"
TEXTS = {
    "closes here-documents": f"x\nPLAN\nNODE\nJOB\n{CANARY}\n",
    "substitutes": f"$({CANARY})`{CANARY}`${{IFS}}",
    "leaves quotes": f"'; {CANARY}; '\"; {CANARY}; \"",
    "calls": f"os:popen?cmd={CANARY}",
    "leaves comments": f"x\r{CANARY}\x85{CANARY}\u2028{CANARY}\u2029{CANARY}",
    "is not printable": "x\x00\x1b[2J\x7f\x9b\u202e\ud800\ufffe\U000e0001",
    "is a template": "{model} {0} %s ${MODEL} \\",
    "leaves Python": f'"""\nimport os; os.system(\'{CANARY}\')\n"""',
    "is YAML": "x\n---\nkind: Evil\n",
}
NUMBERS_OF_NODES = (1, 2)


def _spoilt(value: Any, text: str) -> Any:
    """The value with the text in place of every text in it, but those that one of a fixed list must be."""
    if isinstance(value, str):
        return text
    if isinstance(value, tuple):
        return tuple(_spoilt(item, text) for item in value)
    if not is_dataclass(value):
        return value
    copy = object.__new__(type(value))
    for field in fields(value):
        held = getattr(value, field.name)
        fixed = field.name in ("schedule", "optimizer", "dtype", "plan_id", "engine", "sharding", "offload")
        object.__setattr__(copy, field.name, held if fixed else _spoilt(held, text))
    return copy


def _source(text: str, nodes: int = 1) -> ExportSource:
    answer = halve("pipedream-2bw", PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=16))
    assert isinstance(answer, Plan)
    plan = replace(answer, optimizer="adam", stages=tuple(replace(stage, device="A") for stage in answer.stages))
    levels = (Level(size=2 // nodes, bandwidth_bytes_per_s=1e11), Level(size=nodes, bandwidth_bytes_per_s=1e9))
    source = ExportSource(
        plan_id="0123456789abcdef" * 2,
        plan=plan,
        cluster=replace(CLUSTER, levels=levels),
        block_names=tuple(block.name for block in PROFILE.blocks),
    )
    return _spoilt(source, text)  # type: ignore[no-any-return]


def _stand_ins(folder: Path) -> dict[str, str]:
    """An environment in which what scripts start prints its arguments, and srun runs what it is given."""
    programs = {
        "pipeplan-agent": 'printf "%s\\0" "$@"',
        "scontrol": "echo node-0",
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    }
    for name, line in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    given = {"DATA": "preset:random_tokens", "STEPS": "7", "OUT": str(folder / "out dir")}
    cluster = {"SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "x", "NODE_RANK": "1", "MASTER_ADDR": "node-0"}
    return {"PATH": f"{folder}:{os.defpath}", "TMPDIR": str(folder)} | given | cluster


def _run(script: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = _stand_ins(folder) | more
    path = folder / "script.sh"
    path.write_text(script, encoding="utf-8")
    return subprocess.run(
        ["bash", str(path), "--resume", "a b"], capture_output=True, text=True, env=environment, cwd=folder, check=False
    )


def _script(name: str, source: ExportSource, folder: Path) -> str:
    """The script in an export, as the target would run it."""
    text = FORMATS[name].write(source)
    if name != "kubernetes":
        return text
    settings, _, job = yaml.safe_load_all(text)
    assert job["kind"] == "Job"
    (folder / "plan.json").write_text(settings["data"]["plan.json"])
    return str(settings["data"]["node.sh"]).replace("/plan/plan.json", str(folder / "plan.json"))


@pytest.mark.parametrize("nodes", NUMBERS_OF_NODES)
@pytest.mark.parametrize("name", ["torchrun", "slurm", "kubernetes"])
@pytest.mark.parametrize("kind", TEXTS)
def test_a_script_executes_nothing_that_a_document_holds(kind: str, name: str, nodes: int, tmp_path: Path) -> None:
    source = _source(TEXTS[kind], nodes)
    script = _script(name, source, tmp_path)
    refused = _run(script, tmp_path)
    assert (refused.returncode, "MODEL: name the model" in refused.stderr) == (2, True), refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    done = _run(script, tmp_path, MODEL="mine:model")
    words = done.stdout.split("\0")
    assert done.returncode == 0, done.stderr
    assert words[words.index("--model") + 1] == "mine:model"
    assert words[words.index("--out") + 1].endswith("out dir")
    assert words[-3:] == ["--resume", "a b", ""]
    assert ("--nodes" in words) == (nodes == 2)
    if nodes == 2:
        assert (words[words.index("--node-rank") + 1], words[words.index("--master-addr") + 1]) == ("1", "node-0")
    written = json.loads(Path(words[words.index("--plan") + 1]).read_text())
    assert written["model"] == {"name": TEXTS[kind], "spec": TEXTS[kind]}
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("kind", TEXTS)
def test_megatrons_arguments_are_the_same_words_whatever_a_document_holds(kind: str, tmp_path: Path) -> None:
    text = FORMATS["megatron"].write(_source(TEXTS[kind]))
    done = _run(text + 'printf "%s\\0" "${MEGATRON_ARGS[@]}"\n', tmp_path)
    usual = FORMATS["megatron"].write(_source("mine:model"))
    words = usual[usual.index("(\n") + 2 : usual.rindex("\n)")]
    assert done.stdout.split("\0")[:-1] == shlex.split(words)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("kind", TEXTS)
def test_documents_parse_as_what_they_are_whatever_a_text_holds(kind: str) -> None:
    source = _source(TEXTS[kind])
    assert "training" in tomllib.loads(FORMATS["torchtitan"].write(source))
    assert json.loads(FORMATS["deepspeed"].write(source))["config"]["optimizer"]["type"] == "Adam"
    assert json.loads(FORMATS["chrome-trace"].write(source))["traceEvents"]
    assert [document["kind"] for document in yaml.safe_load_all(FORMATS["kubernetes"].write(source))] == [
        "ConfigMap",
        "Service",
        "Job",
    ]
    module = ast.parse(format_named("torchtitan", "2026-08").write(source))
    kinds = [type(statement).__name__ for statement in module.body]
    assert kinds == ["Expr", "ImportFrom", "Assign", "FunctionDef", "FunctionDef"]


@pytest.mark.parametrize(
    ("spec", "default"),
    [
        ("hf:gpt2?n_layer=4&name=it%27s", True),
        ("hf:gpt2?name='$(touch%20canary)'", True),
        ("preset:mlp?depth=3", True),
        ("mine.models:gpt?depth=3", False),
        ("subprocess:getoutput?cmd=reboot", False),
        ("hf:/models/config.json", False),
        ("hf:unknown", False),
        (None, False),
    ],
)
@pytest.mark.parametrize("name", ["torchrun", "slurm", "kubernetes"])
def test_only_what_is_built_in_is_a_default_model(name: str, spec: str | None, default: bool, tmp_path: Path) -> None:
    source = _source("mine:model")
    object.__setattr__(source.plan, "model", Model(name="model", spec=spec))
    done = _run(_script(name, source, tmp_path), tmp_path)
    if default:
        words = done.stdout.split("\0")
        assert words[words.index("--model") + 1] == spec
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.rstrip().endswith(f"the profile names {spec or 'none'}")
    assert not (tmp_path / "canary").exists()
