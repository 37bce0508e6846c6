"""Exports: what is written parses as what it is, says which plan it is of, and what the target cannot express."""

import json
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.files import parse_plan
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan, Stage, Worker
from pipeplan.documents.profile import Model
from pipeplan.documents.tied import TiedWeights
from pipeplan.errors import InvalidInputError
from pipeplan.exports.formats import FORMATS, format_named
from pipeplan.exports.source import ExportSource
from pipeplan.planners.problem import PlanningProblem
from pipeplan.programs.program import pipelines_in_a_row, stages_in_a_row
from planner_service.overview.openapi import CLUSTER, PROFILE
from tests.planner_service.answers import halve

LAYERS = ("embedding", "layer.0", "layer.1", "layer.2", "layer.3", "head")


def _plan(**changes: Any) -> Plan:
    answer = halve("pipedream-2bw", PlanningProblem(profile=PROFILE, cluster=CLUSTER, batch_size=16))
    assert isinstance(answer, Plan)
    return replace(answer, **changes)


def _source(plan: Plan, names: tuple[str, ...] = LAYERS, cluster: Cluster = CLUSTER) -> ExportSource:
    return ExportSource(plan_id=content_id(plan), plan=plan, cluster=cluster, block_names=names)


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
    plan = _plan(**_stages(2, 2))
    levels = (Level(size=4 // nodes, bandwidth_bytes_per_s=1e11), Level(size=nodes, bandwidth_bytes_per_s=1e9))
    text = FORMATS[name].write(_source(plan, cluster=replace(CLUSTER, levels=levels)))
    _bash(text)
    assert ("--nodes 2" in text.replace("#SBATCH", "")) == (nodes == 2)
    line = next(line for line in text.splitlines() if line.startswith("{"))
    assert json.loads(line)["placement"] == [{"replica": w.replica, "stage": w.stage} for w in plan.placement]


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
    plan = _plan(**_stages(2, 2))
    text = FORMATS["kubernetes"].write(_source(plan, cluster=replace(CLUSTER, levels=levels)))
    settings, service, job = yaml.safe_load_all(text)
    _bash(settings["data"]["node.sh"])
    assert "--nodes 2" in settings["data"]["node.sh"]
    assert parse_plan(settings["data"]["plan.json"]) == plan
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
        "--num-layers 4 --tensor-model-parallel-size 1 --overlap-grad-reduce --pipeline-model-parallel-size 2"
        " --pipeline-model-parallel-layout 'Et*2|t*2L' --micro-batch-size 2 --global-batch-size 32"
        " --optimizer adam --bf16 --untie-embeddings-and-output-weights"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )


def test_recomputation_by_block_is_a_checkpoint_a_layer() -> None:
    """As a whole it is what comes nearest: Megatron's note says so, DeepSpeed's interval is the longest stage."""
    for unit, interval in (("stage", 3), ("block", 1)):
        plan = _plan(**_stages(2, 2, recompute=(True, True)), optimizer="adamw", schedule="1f1b")
        plan = replace(plan, stages=tuple(replace(stage, recompute_unit=unit) for stage in plan.stages))
        megatron = FORMATS["megatron"].write(_source(plan))
        assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in megatron
        assert ("the plan a stage's only" in megatron) == (unit == "stage")
        pipeline = json.loads(FORMATS["deepspeed"].write(_source(plan)))["pipeline"]
        assert pipeline["activation_checkpoint_interval"] == interval
        assert [stage.get("recompute_unit", "stage") for stage in pipeline["stages"]] == [unit] * 2
        assert 'mode = "full"' in FORMATS["torchtitan"].write(_source(plan))


def test_deepspeed_gets_batches_that_multiply_and_the_cuts() -> None:
    plan = _plan(**_stages(2, 2), optimizer="adam")
    document = json.loads(FORMATS["deepspeed"].write(_source(plan)))
    config, pipeline = document["config"], document["pipeline"]
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == product * pipeline["data_parallel_degree"]
    assert pipeline["parts"] == [0, 3, 6]
    assert pipeline["stages"][1]["blocks"] == list(LAYERS[3:])
    assert config["optimizer"] == {"type": "Adam", "params": {"adam_w_mode": False}}


def test_torchtitan_gets_its_modules_by_stage_and_its_replicas_as_shards() -> None:
    """Beside a pipeline torchtitan refuses DDP: "DDP has not supported > 1D parallelism"."""
    plan = _plan(**_stages(2, 2), optimizer="adamw", schedule="gpipe")
    text = FORMATS["torchtitan"].write(_source(plan))
    document = tomllib.loads(text)
    assert document["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "GPipe",
        "pipeline_parallel_microbatch_size": 2,
        "module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1"],
            ["layers.2", "layers.3", "norm", "output"],
        ],
    }
    assert document["training"] == {"local_batch_size": 16, "global_batch_size": 32}
    assert "FSDP" in text and "same names" not in text


class _Config:
    """A stand-in for torchtitan's configurations, with the fields that a test names and no others."""

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in vars(self)["names"]:
            raise AttributeError(name)
        object.__setattr__(self, name, value)


def _torchtitan_config() -> Any:
    """Fields as in torchtitan's commit b5bcd76c6."""
    config = SimpleNamespace()
    config.training = _Config(
        "num_tokens_per_microbatch_per_dp_rank",
        "num_tokens_per_train_step",
        "max_context_length",
        "mixed_precision_param",
        "disable_cuda_graphs",
    )
    config.training.max_context_length = 2048
    config.parallelism = _Config(
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "fsdp_reshard_after_forward",
        "enable_sequence_parallel",
        "context_parallel_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
        "num_pp_microbatches",
        "module_fqns_per_model_part",
    )
    config.optimizer = SimpleNamespace(param_groups=[SimpleNamespace(optimizer_name="AdamW")])
    config.activation_checkpoint = "selective"
    return config


def _planned(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration that the Python export makes of one that a module holds."""
    checkpointing = ModuleType("torchtitan.distributed.activation_checkpoint")
    vars(checkpointing)["FullAC"] = SimpleNamespace(Config=lambda: "full")
    registry = ModuleType("registry")
    vars(registry)["tiny"] = _torchtitan_config
    for module in (checkpointing, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    text = format_named("torchtitan", "2026-08").write(_source(plan))
    names: dict[str, Any] = {}
    exec(compile(text, "planned.py", "exec"), names)
    with pytest.raises(ValueError, match="BASE must name a configuration"):
        names["planned"]()
    names["BASE"] = "registry:tiny"
    return names["planned"]()


def test_torchtitans_python_configuration_has_its_own_names_and_head(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(**_stages(2, 2, recompute=(True, True)), optimizer="adam", schedule="1f1b")
    config = _planned(plan, monkeypatch)
    assert config.training.num_tokens_per_microbatch_per_dp_rank == 2 * 2048
    assert config.training.num_tokens_per_train_step == 32 * 2048
    assert config.training.disable_cuda_graphs is True
    assert config.parallelism.num_pp_microbatches == 8
    assert config.parallelism.pipeline_parallel_schedule == "1F1B"
    assert config.parallelism.pipeline_parallel_degree == 2
    assert (config.parallelism.data_parallel_replicate_degree, config.parallelism.data_parallel_shard_degree) == (1, 2)
    assert config.parallelism.module_fqns_per_model_part == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "layers.3", "norm", "lm_head"],
    ]
    assert config.optimizer.param_groups[0].optimizer_name == "Adam"
    assert config.activation_checkpoint == "full"


def test_torchs_1f1b_has_a_microbatch_for_every_stage() -> None:
    plan = _plan(**_stages(2, 2), optimizer="adam", schedule="1f1b", microbatches=1)
    with pytest.raises(InvalidInputError, match="a microbatch for each of the 2 stages, at least, got '1"):
        FORMATS["torchtitan"].write(_source(plan))
    FORMATS["torchtitan"].write(_source(replace(plan, schedule="gpipe")))
    FORMATS["megatron"].write(_source(plan))


def test_without_a_pipeline_torchtitan_accumulates_the_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local batch was once the whole of a replica's: one forward of all microbatches, and its memory."""
    plan = _one_stage()
    document = tomllib.loads(FORMATS["torchtitan"].write(_source(plan)))
    assert document["training"] == {"local_batch_size": 2, "global_batch_size": 32}
    config = _planned(plan, monkeypatch)
    assert config.training.num_tokens_per_microbatch_per_dp_rank == 2 * 2048
    assert config.training.num_tokens_per_train_step == 32 * 2048
    assert (config.parallelism.data_parallel_replicate_degree, config.parallelism.data_parallel_shard_degree) == (2, 1)
    assert config.activation_checkpoint is None


def _interleaved(width: int = 1) -> Plan:
    """Four stages of one or two blocks, two on each rank of a pipeline."""
    cuts = ((0, 2), (2, 3), (3, 4), (4, 6))
    return _plan(
        stages=tuple(Stage(start=start, stop=stop, replicas=width) for start, stop in cuts),
        placement=stages_in_a_row((width, width)),
        costs=_plan().costs[:1] * 4,
        chunks=2,
        schedule="1f1b-interleaved",
        optimizer="adam",
    )


@pytest.mark.parametrize("width", [1, 2])
def test_interleaved_stages_are_virtual_ones_on_as_many_ranks_as_the_plan_has(width: int) -> None:
    """Megatron: "world size (2) is not divisible by total_model_size (4)"."""
    plan = _interleaved(width)
    text = FORMATS["megatron"].write(_source(plan))
    words = _evaluated(text)
    size = int(words[words.index("--pipeline-model-parallel-size") + 1])
    layout = words[words.index("--pipeline-model-parallel-layout") + 1]
    assert (size, plan.workers % size, layout) == (2, 0, "Et|t|t|tL")
    assert f"{2 * width} ranks: {width} replicas" in text
    assert "1F1B with a flush" not in text
    toml = FORMATS["torchtitan"].write(_source(plan))
    parallelism = tomllib.loads(toml)["parallelism"]
    assert parallelism["pipeline_parallel_degree"] == 2
    assert parallelism["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert len(parallelism["module_fqns_per_model_part"]) == 4
    assert "1F1B with a flush" not in toml


def test_deepspeed_which_does_not_interleave_refuses_such_a_plan() -> None:
    with pytest.raises(InvalidInputError, match=r"its pipeline does not interleave.*got '2 stages a rank'"):
        FORMATS["deepspeed"].write(_source(_interleaved()))


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "deepspeed"])
def test_a_plan_whose_ranks_hold_two_stages_in_a_v_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"cannot be {name}: its ranks would hold other stages.*got 'zb-v'"):
        FORMATS[name].write(_source(replace(_interleaved(), schedule="zb-v")))


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"chrome-trace"}))
@pytest.mark.parametrize("estimated", [True, False])
def test_an_export_of_an_estimated_plan_says_so(name: str, estimated: bool) -> None:
    text = FORMATS[name].write(_source(_plan(optimizer="adam", estimated=estimated)))
    assert ("estimated: the plan's profile was computed from a datasheet, not measured" in text) == estimated


@pytest.mark.parametrize(
    ("spec", "untied", "assumed"),
    [
        ("hf:gpt2?n_layer=4", True, False),
        ("hf:gpt2?tie_word_embeddings=false", True, False),
        ("hf:gpt2?tie_word_embeddings=true", False, False),
        ("hf:/models/gpt2", False, True),  # its config says so, which nobody but the worker has read
        ("hf:/models/gpt2?tie_word_embeddings=false", True, False),
        ("mine.models:gpt", False, True),
        ("preset:mlp", False, True),
        (None, False, True),
    ],
)
def test_megatron_unties_what_is_known_to_be_untied(spec: str | None, untied: bool, assumed: bool) -> None:
    text = FORMATS["megatron"].write(_source(_plan(model=Model(name="model", spec=spec))))
    assert ("--untie-embeddings-and-output-weights" in _evaluated(text)) == untied
    assert ("does not say whether the embedding and the head share weights" in text) == assumed


TIED = (TiedWeights(block=0, also=(5,), weight_bytes=8),)


@pytest.mark.parametrize(
    ("name", "says"),
    [("megatron", ""), ("deepspeed", "TiedLayerSpec"), ("torchtitan", "refuses models that tie weights")],
)
@pytest.mark.parametrize("spec", ["hf:/models/gpt2", "mine.models:gpt", None])
def test_a_profile_says_that_the_embedding_and_the_head_share_weights(name: str, says: str, spec: str | None) -> None:
    """Plans of a folder whose weights are tied were exported with separate ones."""
    plan = _plan(**_stages(1, 1), model=Model(name="model", spec=spec), optimizer="adam", microbatches=2)
    text, without = (FORMATS[name].write(replace(_source(plan), tied_weights=tied)) for tied in (TIED, ()))
    if says:
        assert says in text and says not in without
    assert "--untie" not in text


@pytest.mark.parametrize(
    ("name", "version", "sentence"),
    [
        ("torchtitan", "0.1", "target_version: must be one of 0.2, 2026-08 for torchtitan, got '0.1'"),
        ("torchtitan", "", "target_version: must be one of 0.2, 2026-08 for torchtitan, got ''"),
        ("slurm", "24", "target_version: must be left out for slurm: one export fits all, got '24'"),
    ],
)
def test_a_version_that_no_export_is_for_is_refused_with_those_there_are(
    name: str, version: str, sentence: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        format_named(name, version)
    assert str(caught.value) == sentence


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
    assert ("no block with the name of the embedding" in text) == (name != "deepspeed")


def test_sgd_is_nothing_that_torchtitan_has() -> None:
    with pytest.raises(InvalidInputError, match="Adam and AdamW only"):
        FORMATS["torchtitan"].write(_source(_plan(optimizer="sgd")))


def test_a_graphs_order_is_refused_by_all_who_cut_chains() -> None:
    plan = _plan(order=(1, 0, 2, 3), optimizer="adam")
    for name in set(FORMATS) - {"chrome-trace"}:
        with pytest.raises(InvalidInputError, match="order"):
            FORMATS[name].write(_source(plan))


def _one_stage() -> Plan:
    return _plan(
        stages=(Stage(start=0, stop=6, replicas=2),),
        placement=(Worker(stage=0), Worker(stage=0, replica=1)),
        costs=_plan().costs[:1],
        schedule="data-parallel",
        optimizer="adam",
    )


def test_one_stage_needs_no_pipeline() -> None:
    plan = _one_stage()
    assert "--pipeline-model-parallel-layout" not in FORMATS["megatron"].write(_source(plan))
    document = tomllib.loads(FORMATS["torchtitan"].write(_source(plan)))
    assert document["parallelism"]["data_parallel_replicate_degree"] == 2
    assert "pipeline_parallel_schedule" not in document["parallelism"]
