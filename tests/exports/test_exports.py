"""Exports: what is written parses as what it is, says which plan it is of, and what the target cannot express."""

import json
import shlex
import subprocess
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import yaml

from planner_service.api.examples import CLUSTER, PROFILE
from planner_service.core.cluster import Cluster, Level
from planner_service.core.errors import InvalidInputError
from planner_service.core.identity import content_id
from planner_service.core.plan import Plan, Stage, Worker
from planner_service.core.planner.problem import Problem
from planner_service.core.profile import Model
from planner_service.core.schedule.program import pipelines_in_a_row, stages_in_a_row
from planner_service.exports.formats import FORMATS, format_named
from planner_service.exports.source import Source
from tests.service.answers import halve

LAYERS = ("embedding", "layer.0", "layer.1", "layer.2", "layer.3", "head")
EVIL = "hf:gpt2'; touch /tmp/x #\n$(reboot)`reboot`"


def _evil_model() -> Model:
    """A model that no document can hold: the writers must be safe all the same."""
    model = Model(name="model")
    for field in ("name", "spec"):
        object.__setattr__(model, field, EVIL)
    return model


def _plan(**changes: Any) -> Plan:
    answer = halve("pipedream-2bw", Problem(profile=PROFILE, cluster=CLUSTER, batch_size=16))
    assert isinstance(answer, Plan)
    return replace(answer, **changes)


def _source(plan: Plan, names: tuple[str, ...] = LAYERS, cluster: Cluster = CLUSTER) -> Source:
    return Source(plan_id=content_id(plan), plan=plan, cluster=cluster, block_names=names)


def _stages(*replicas: int, recompute: tuple[bool, ...] = ()) -> dict[str, Any]:
    """Stages of three blocks of LAYERS each, so often."""
    flags = recompute or (False,) * len(replicas)
    stages = tuple(
        Stage(start=3 * i, stop=3 * i + 3, replicas=count, recompute=flags[i]) for i, count in enumerate(replicas)
    )
    return {"stages": stages, "placement": stages_in_a_row(replicas), "costs": _plan().costs[:1] * len(replicas)}


def _bash(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)


def _evaluated(text: str) -> list[str]:
    """A bash array's words."""
    _bash(text)
    script = text + 'printf "%s\\0" "${MEGATRON_ARGS[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_names_the_plan_or_is_its_timeline(name: str) -> None:
    plan = _plan(**_stages(1, 1), optimizer="adam")
    text = format_named(name).write(_source(plan))
    assert content_id(plan) in text or name == "chrome-trace"


def test_a_format_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match=r"format: must be one of torchrun, slurm, .*, got 'horovod'"):
        format_named("horovod")


@pytest.mark.parametrize("name", ["torchrun", "slurm"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_scripts_are_bash_and_hold_the_whole_plan(name: str, nodes: int) -> None:
    plan = _plan(**_stages(2, 2), model=_evil_model())
    levels = (Level(size=4 // nodes, bandwidth_bytes_per_s=1e11), Level(size=nodes, bandwidth_bytes_per_s=1e9))
    text = FORMATS[name].write(_source(plan, cluster=replace(CLUSTER, levels=levels)))
    _bash(text)
    assert ("torchrun --nnodes 2 --nproc-per-node 2" in text) == (nodes == 2)
    assert ("exec pipeplan-agent run" in text) == (nodes == 1)
    line = next(line for line in text.splitlines() if line.startswith("{"))
    assert json.loads(line)["placement"] == [{"replica": w.replica, "stage": w.stage} for w in plan.placement]


def test_a_script_runs_what_it_is_told_and_nothing_that_a_name_holds(tmp_path: Any) -> None:
    """The agent is a stand-in that prints its arguments."""
    agent = tmp_path / "pipeplan-agent"
    agent.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    agent.chmod(0o755)
    plan = _plan(model=_evil_model())
    text = FORMATS["torchrun"].write(_source(plan))
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "DATA": "worker_agent.models.text:random_tokens?vocab_size=50257",
        "STEPS": "7",
        "OUT": "out dir",
    }
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environment, cwd=tmp_path)
    arguments = done.stdout.split("\0")
    assert done.returncode == 0, done.stderr
    assert arguments[arguments.index("--model") + 1] == EVIL
    assert arguments[arguments.index("--out") + 1] == "out dir"
    missing = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert missing.returncode != 0
    assert "DATA: name the data" in missing.stderr


def test_slurm_asks_for_the_nodes_and_gpus_that_the_plan_takes() -> None:
    levels = (Level(size=2, bandwidth_bytes_per_s=1e11), Level(size=2, bandwidth_bytes_per_s=1e9))
    text = FORMATS["slurm"].write(_source(_plan(**_stages(2, 2)), cluster=replace(CLUSTER, levels=levels)))
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert directives[1:] == ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2"]


def test_workers_that_no_equal_nodes_hold_are_refused() -> None:
    levels = (Level(size=2, bandwidth_bytes_per_s=1e11), Level(size=2, bandwidth_bytes_per_s=1e9))
    source = _source(_plan(**_stages(2, 1)), cluster=replace(CLUSTER, levels=levels))
    for name in ("torchrun", "slurm", "kubernetes"):
        with pytest.raises(InvalidInputError, match="as many processes on every node"):
            FORMATS[name].write(source)


def test_kubernetes_has_a_pod_a_node_that_finds_the_first_one() -> None:
    levels = (Level(size=2, bandwidth_bytes_per_s=1e11), Level(size=2, bandwidth_bytes_per_s=1e9))
    plan = _plan(**_stages(2, 2), model=_evil_model())
    text = FORMATS["kubernetes"].write(_source(plan, cluster=replace(CLUSTER, levels=levels)))
    settings, service, job = yaml.safe_load_all(text)
    _bash(settings["data"]["node.sh"])
    assert "torchrun --nnodes 2" in settings["data"]["node.sh"]
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]["spec"]
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    assert pod["subdomain"] == service["metadata"]["name"] == service["spec"]["selector"]["job-name"]
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    address = next(item["value"] for item in container["env"] if item["name"] == "MASTER_ADDR")
    assert address == f"{job['metadata']['name']}-0.{pod['subdomain']}"


def test_megatron_gets_the_layout_of_the_stages() -> None:
    plan = _plan(**_stages(2, 2, recompute=(True, True)), dtype="bfloat16", optimizer="adamw", schedule="1f1b")
    text = FORMATS["megatron"].write(_source(plan))
    words = _evaluated(text)
    assert words == shlex.split(
        "--num-layers 4 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"
        " --pipeline-model-parallel-layout 'Et*2|t*2L' --micro-batch-size 2 --global-batch-size 32"
        " --optimizer adam --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )


def test_deepspeed_gets_batches_that_multiply_and_the_cuts() -> None:
    plan = _plan(**_stages(2, 2), optimizer="adam")
    document = json.loads(FORMATS["deepspeed"].write(_source(plan)))
    config, pipeline = document["config"], document["pipeline"]
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == product * pipeline["data_parallel_degree"]
    assert pipeline["parts"] == [0, 3, 6]
    assert pipeline["stages"][1]["blocks"] == list(LAYERS[3:])
    assert config["optimizer"] == {"type": "Adam", "params": {"adam_w_mode": False}}


def test_torchtitan_gets_its_modules_by_stage() -> None:
    plan = _plan(**_stages(2, 2), optimizer="adamw", schedule="gpipe")
    document = tomllib.loads(FORMATS["torchtitan"].write(_source(plan)))
    assert document["parallelism"]["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "layers.3", "norm", "output"],
    ]
    assert document["parallelism"]["pipeline_parallel_schedule"] == "GPipe"
    assert document["training"] == {"local_batch_size": 16, "global_batch_size": 32}


@pytest.mark.parametrize("name", ["megatron", "deepspeed", "torchtitan"])
def test_unequal_replicas_are_refused_by_those_who_know_one_number(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"cannot be {name}: it has one number of replicas.*got '2, 1'"):
        FORMATS[name].write(_source(_plan(**_stages(2, 1), optimizer="adam")))


@pytest.mark.parametrize("name", ["megatron", "deepspeed", "torchtitan"])
def test_what_is_lost_is_said(name: str) -> None:
    changes = _stages(2, 2, recompute=(True, False)) | {"placement": pipelines_in_a_row((2, 2))}
    plan = _plan(**changes, schedule="pipedream-2bw", split_backward=True, optimizer="adam")
    text = FORMATS[name].write(_source(plan, names=tuple(f"block{i}" for i in range(6))))
    for part in ("pipedream-2bw", "without staleness", "2BP", "Only stages 0 recompute", "pipeline after pipeline"):
        assert part in text
    assert ("no block that is named as the embedding" in text) == (name != "deepspeed")


def test_sgd_is_nothing_that_torchtitan_has() -> None:
    with pytest.raises(InvalidInputError, match="Adam and AdamW only"):
        FORMATS["torchtitan"].write(_source(_plan(optimizer="sgd")))


def test_a_graphs_order_is_refused_by_all_who_cut_chains() -> None:
    plan = _plan(order=(1, 0, 2, 3), optimizer="adam")
    for name in set(FORMATS) - {"chrome-trace"}:
        with pytest.raises(InvalidInputError, match="order"):
            FORMATS[name].write(_source(plan))


def test_one_stage_needs_no_pipeline() -> None:
    stages = (Stage(start=0, stop=6, replicas=2),)
    placement = (Worker(stage=0), Worker(stage=0, replica=1))
    plan = _plan(
        stages=stages, placement=placement, costs=_plan().costs[:1], schedule="data-parallel", optimizer="adam"
    )
    assert "--pipeline-model-parallel-layout" not in FORMATS["megatron"].write(_source(plan))
    document = tomllib.loads(FORMATS["torchtitan"].write(_source(plan)))
    assert document["parallelism"]["data_parallel_replicate_degree"] == 2
    assert "pipeline_parallel_schedule" not in document["parallelism"]
