"""Exports of plans for other engines: every degree of the plan is in the target's own words, or is refused by name."""

import json
import tomllib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.forms import MODULES, Form
from pipeplan.documents.identity import content_id
from pipeplan.documents.plan import Plan
from pipeplan.errors import InvalidInputError
from pipeplan.exports.formats import format_named
from pipeplan.exports.source import ExportSource
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.planners.solve import solve
from tests.pipeplan.model_forms import transformer

PROFILE = transformer(layers=6, hidden=256, heads=8, sequence=256, contexts=(1, 2), sizes=(1, 2), vocabulary=1024)
CLUSTER = Cluster(device=PROFILE.device, levels=(Level(size=16, bandwidth_bytes_per_s=200e9),))


@lru_cache
def _source(engine: str, *, dtype: str = "bfloat16", precision: str | None = None, **fixed: Any) -> ExportSource:
    """The answer for 16 devices with these degrees; DeepSpeed has no sequence parallelism."""
    options = Options(engine=engine, **({"optimizer": "adamw"} | fixed))
    forms = PROFILE.forms
    if engine == "deepspeed":
        forms = tuple(replace(each, form=replace(each.form, sequence_parallel=False)) for each in forms)
    profile = replace(PROFILE, dtype=dtype, forms=forms, precision=precision)
    plan = solve("auto", PlanningProblem(profile=profile, cluster=CLUSTER, batch_size=32, options=options))
    assert isinstance(plan, Plan)
    names = tuple(block.name for block in PROFILE.blocks)
    return ExportSource(plan_id=content_id(plan), plan=plan, cluster=CLUSTER, block_names=names)


def _words(source: ExportSource) -> str:
    return " ".join(format_named("megatron").write(source).split())


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        (
            {"tensor": 2, "stages": 1, "data": 8, "sharding": "weights", "microbatch_size": 2, "recompute": False},
            {
                "data_parallel_shard_degree": 8,
                "tensor_parallel_degree": 2,
                "fsdp_reshard_after_forward": "always",
                "pipeline_parallel_degree": 1,
            },
        ),
        (
            {"tensor": 2, "context": 2, "stages": 2, "chunks": 1, "data": 2, "sharding": "gradients"},
            {
                "data_parallel_shard_degree": 2,
                "tensor_parallel_degree": 2,
                "context_parallel_degree": 2,
                "fsdp_reshard_after_forward": "never",
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "1F1B",
            },
        ),
        (
            {"tensor": 1, "context": 1, "stages": 2, "chunks": 2, "data": 8, "sharding": "weights"},
            {
                "data_parallel_shard_degree": 8,
                "tensor_parallel_degree": 1,
                "fsdp_reshard_after_forward": "never",
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "Interleaved1F1B",
            },
        ),
    ],
)
def test_torchtitan_has_every_degree_of_an_fsdp_plan(fixed: dict[str, Any], expected: dict[str, Any]) -> None:
    source = _source("fsdp", **fixed)
    plan = source.plan
    document = tomllib.loads(format_named("torchtitan").write(source))
    parallelism = document["parallelism"]
    parts = parallelism.pop("module_fqns_per_model_part", None)
    size = parallelism.pop("pipeline_parallel_microbatch_size", None)
    assert parallelism == {"data_parallel_replicate_degree": 1} | expected
    degrees = [value for name, value in parallelism.items() if name.endswith("_degree")]
    product = 1
    for degree in degrees:
        product *= degree
    assert product == plan.workers == 16, "torchtitan asserts that the degrees multiply to the number of ranks"
    assert document["training"]["global_batch_size"] == 32
    assert document["training"]["mixed_precision_param"] == "bfloat16"
    if expected["pipeline_parallel_degree"] > 1:
        assert size == plan.microbatch_size
        assert document["training"]["local_batch_size"] == plan.microbatch_size * plan.microbatches
        assert len(parts) == plan.depth
    else:
        assert document["training"]["local_batch_size"] == plan.microbatch_size


def test_megatron_sends_tokens_to_their_experts_as_the_plan_does() -> None:
    """Its default gathers all tokens on every device: other seconds, and other memory."""
    source = _source("megatron", tensor=1, data=4)
    shared = replace(source, plan=replace(source.plan, form=replace(source.plan.form, expert=2)))
    assert "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall" in _words(shared)
    assert "dispatcher" not in _words(source)


@pytest.mark.parametrize("sharding", ["optimizer", "weights"])
def test_deepspeed_says_what_its_checkpoints_on_the_host_need(sharding: str) -> None:
    """Nothing in DeepSpeed calls `configure`: without the call, the configuration's cpu_checkpointing has no effect."""
    source = _source("deepspeed", tensor=1, stages=1, sharding=sharding, recompute=True)
    for offload, said in (("activations", True), ("none", False)):
        text = format_named("deepspeed").write(replace(source, plan=replace(source.plan, offload=offload)))
        assert ("deepspeed.checkpointing.configure(mpu, deepspeed_config=config)" in text) == said


def test_engines_share_out_the_states_of_those_optimizers_that_they_can() -> None:
    """Megatron-LM asserts Adam in its distributed optimizer, DeepSpeed asks for a setting: both ended."""
    assert _source("megatron", optimizer="momentum").plan.sharding == "none"
    assert _source("megatron", optimizer="adam", data=4).plan.sharding == "optimizer"
    plan = replace(_source("megatron", data=4).plan, optimizer="sgd")  # of an earlier release
    with pytest.raises(InvalidInputError, match="distributed optimizer is Adam alone, got 'sgd'"):
        format_named("megatron").write(replace(_source("megatron", data=4), plan=plan))
    for optimizer, untested in (("momentum", True), ("adamw", None)):
        source = _source("deepspeed", optimizer=optimizer, tensor=1, stages=1, sharding="optimizer")
        config = json.loads(format_named("deepspeed").write(source))["config"]
        assert config.get("zero_allow_untested_optimizer") is untested


@pytest.mark.parametrize(
    ("unit", "expected", "kind"),
    [
        ("block", {"mode": "full"}, "FullAC.Config()"),
        ("operation", {"mode": "selective", "selective_ac_option": "op"}, "SelectiveAC.Config()"),
        (None, {"mode": "none"}, "None"),
    ],
)
def test_torchtitan_checkpoints_layers_as_the_plan_does(unit: str | None, expected: dict[str, str], kind: str) -> None:
    source = _source("fsdp", tensor=2, stages=1, recompute=False)
    stages = [replace(each, recompute=unit is not None, recompute_unit=unit or "stage") for each in source.plan.stages]
    source = replace(source, plan=replace(source.plan, stages=tuple(stages)))
    assert tomllib.loads(format_named("torchtitan").write(source))["activation_checkpoint"] == expected
    text = format_named("torchtitan", "2026-08").write(source)
    assert f"config.activation_checkpoint = {kind}\n" in text
    assert unit is None or f"import {kind.removesuffix('.Config()')}\n" in text


def test_torchtitans_python_has_the_same_degrees_and_says_whether_tokens_are_shared() -> None:
    text = format_named("torchtitan", "2026-08").write(_source("fsdp", tensor=4, context=2, stages=1))
    assert "config.parallelism.tensor_parallel_degree = 4" in text
    assert "config.parallelism.context_parallel_degree = 2" in text
    assert "config.parallelism.enable_sequence_parallel = True" in text
    assert "config.training.mixed_precision_param = 'bfloat16'" in text


def test_deepspeed_sums_in_float32_where_its_optimizer_for_bfloat16_does() -> None:
    """It refuses such sums without ZeRO-1, and its optimizer on the host has none."""
    source = _source("deepspeed", tensor=1, stages=1, sharding="optimizer")
    for sharding, offload, expected in (
        ("optimizer", "none", {"grad_accum_dtype": "fp32"}),
        ("optimizer", "optimizer", None),
        ("none", "none", None),
    ):
        plan = replace(source.plan, sharding=sharding, offload=offload)
        config = json.loads(format_named("deepspeed").write(replace(source, plan=plan)))["config"]
        assert plan.dtype == "bfloat16" and config.get("data_types") == expected


def test_torchtitan_shares_experts_among_replicas() -> None:
    source = _source("fsdp", tensor=1, stages=1, sharding="weights")
    shared = replace(source, plan=replace(source.plan, form=Form(expert=2)))
    parallelism = tomllib.loads(format_named("torchtitan").write(shared))["parallelism"]
    assert (parallelism["expert_parallel_degree"], parallelism["data_parallel_shard_degree"]) == (2, source.plan.width)
    assert "config.parallelism.expert_parallel_degree = 2" in format_named("torchtitan", "2026-08").write(shared)


def test_whole_experts_on_tensor_ranks_are_exported() -> None:
    """Without the argument Megatron cuts experts as it cuts all else; torchtitan's releases say it, its main branch
    knows nothing else."""
    form = Form(tensor=2, sequence_parallel=True, expert=4)
    whole = replace(form, expert_tensor=1)
    source = _source("megatron", tensor=2, stages=1, data=4)
    cut, own = (replace(source, plan=replace(source.plan, form=each)) for each in (form, whole))
    assert "--expert-tensor-parallel-size 1" in _words(own) and "expert-tensor" not in _words(cut)
    hopper = replace(CLUSTER, device=replace(CLUSTER.device, name="H100-SXM5-80GB"))
    deep = "--moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-dtype fp32"
    assert deep in _words(replace(own, cluster=hopper)) and "alltoall" in _words(replace(cut, cluster=hopper))
    assert "alltoall" in _words(own)
    source = _source("fsdp", tensor=2, stages=1, sharding="weights")
    cut, own = (replace(source, plan=replace(source.plan, form=each)) for each in (form, whole))
    for each, degree in ((cut, 2), (own, 1)):
        parallelism = tomllib.loads(format_named("torchtitan").write(each))["parallelism"]
        assert parallelism["expert_tensor_parallel_degree"] == degree
    assert "expert_parallel_degree = 4" in format_named("torchtitan", "2026-08").write(own)
    with pytest.raises(InvalidInputError, match="whose devices hold whole experts"):
        format_named("torchtitan", "2026-08").write(cut)
    deep = format_named("torchtitan").write(replace(own, cluster=hopper))
    assert tomllib.loads(deep)["parallelism"]["expert_parallel_comm_backend"] == "deepep" and "0.2.1 and later" in deep
    odd = replace(own, plan=replace(own.plan, form=replace(whole, expert=1, context=2)))
    assert "For torchtitan 0.2, which" in format_named("torchtitan").write(odd)
    odd = replace(own, plan=replace(own.plan, form=replace(whole, expert=2, context=2)))
    assert "For torchtitan 0.2.1 and later, which" in format_named("torchtitan").write(odd)


@pytest.mark.parametrize("stages", [1, 2])
def test_torchtitan_shares_states_in_as_many_groups_as_the_plan(stages: int) -> None:
    source = _source("fsdp", tensor=1, stages=stages, sharding="gradients", replicate=4)
    assert source.plan.replicate == 4 and source.plan.width is not None
    expected = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": source.plan.width // 4}
    assert expected.items() <= tomllib.loads(format_named("torchtitan").write(source))["parallelism"].items()
    text = format_named("torchtitan", "2026-08").write(source)
    assert all(f"config.parallelism.{name} = {degree}\n" in text for name, degree in expected.items())


def test_torchtitan_leaves_the_optimizer_to_the_host_and_no_activations() -> None:
    source = _source("fsdp", tensor=1, stages=1, sharding="weights")
    on_host = replace(source, plan=replace(source.plan, offload="optimizer"))
    assert tomllib.loads(format_named("torchtitan").write(on_host))["training"]["enable_cpu_offload"] is True
    assert "config.training.enable_cpu_offload = True" in format_named("torchtitan", "2026-08").write(on_host)
    assert "cpu_offload" not in format_named("torchtitan").write(source)
    for offload in ("activations", "both"):
        with pytest.raises(InvalidInputError, match="cannot be torchtitan: it has no setting that leaves activations"):
            format_named("torchtitan").write(replace(source, plan=replace(source.plan, offload=offload)))


@pytest.mark.parametrize(
    ("target", "engine", "fixed", "value"),
    [
        ("torchtitan", "fsdp", {"dtype": "float16"}, "float16"),
        ("torchtitan", "megatron", {}, "megatron"),
        ("megatron", "fsdp", {}, "fsdp"),
        ("deepspeed", "megatron", {}, "megatron"),
    ],
)
def test_what_a_target_cannot_express_is_refused_by_name(
    target: str, engine: str, fixed: dict[str, Any], value: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"cannot be {target}") as raised:
        format_named(target).write(_source(engine, **fixed))
    assert (raised.value.field, raised.value.value) == ("format", value)


def test_torchtitan_0_2_has_no_tensor_parallelism_that_keeps_tokens_whole() -> None:
    source = _source("fsdp", tensor=2, stages=1)
    whole = replace(source, plan=replace(source.plan, form=replace(source.plan.form, sequence_parallel=False)))
    with pytest.raises(InvalidInputError, match="sequence parallelism"):
        format_named("torchtitan").write(whole)
    text = format_named("torchtitan", "2026-08").write(whole)
    assert "config.parallelism.enable_sequence_parallel = False" in text


@pytest.mark.parametrize(
    ("recompute", "unit", "expected"),
    [
        (False, None, None),
        (True, "attention", "--recompute-granularity selective --recompute-modules core_attn"),
        (True, "block", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ],
)
def test_megatron_recomputes_what_the_plan_does(recompute: bool, unit: str | None, expected: str | None) -> None:
    """Recomputation of attention's core was once exported as that of whole layers."""
    words = _words(_source("megatron", tensor=2, recompute=recompute, recompute_unit=unit))
    assert words.count("--recompute-granularity") == (expected is not None)
    assert expected is None or expected in words


@pytest.mark.parametrize("modules", [("moe_act",), ("layernorm", "mla_up_proj"), MODULES])
def test_megatron_frees_the_modules_outputs_that_were_priced(modules: tuple[str, ...]) -> None:
    """Megatron refuses modules that the model does not have."""
    source = _source("megatron", recompute=False, tensor=1, stages=1)
    stages = [replace(each, recompute=True, recompute_unit="modules") for each in source.plan.stages]
    plan = replace(source.plan, stages=tuple(stages), recompute_modules=modules)
    words = _words(replace(source, plan=plan))
    assert f"--recompute-granularity selective --recompute-modules {' '.join(modules)}" in words
    assert ("--moe-grouped-gemm" in words) == ("moe_act" in modules), "it needs grouped products"
    assert words.count("--recompute-modules") == 1
    with pytest.raises(InvalidInputError, match="recompute_modules: must be some of"):
        replace(source.plan, recompute_modules=modules)


@pytest.mark.parametrize(
    ("graphs", "words"),
    [
        ((), None),
        (("full",), "--cuda-graph-impl transformer_engine )"),
        (
            ("attn", "moe_router", "moe_preprocess"),
            "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess )",
        ),
    ],
)
def test_megatron_launches_the_graphs_that_were_priced(graphs: tuple[str, ...], words: str | None) -> None:
    source = _source("megatron", tensor=1, stages=1, recompute=False)
    found = _words(replace(source, plan=replace(source.plan, graphs=graphs)))
    assert words in found if words else "--cuda-graph" not in found
    again = [replace(each, recompute=True, recompute_unit="block") for each in source.plan.stages]
    with pytest.raises(InvalidInputError, match="graphs: must be off where whole blocks run again"):
        replace(source.plan, stages=tuple(again), graphs=("full",))


def test_megatron_has_every_degree_and_the_layout_of_virtual_stages() -> None:
    source = _source("megatron", tensor=2, context=2, stages=2, chunks=2, data=2, sharding="optimizer")
    words = _words(source)
    for argument in (
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --context-parallel-size 2",
        "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
        "--pipeline-model-parallel-size 2",
        "--global-batch-size 32",
        f"--micro-batch-size {source.plan.microbatch_size}",
    ):
        assert argument in words
    assert "Start it on 16 ranks: 2 replicas" in words
    layout = words.split("--pipeline-model-parallel-layout '")[1].split("'")[0]
    assert layout.count("|") == 3


def test_megatron_adds_gradients_up_in_float32_whatever_the_weights_are() -> None:
    """With --bf16 it is Megatron's default, with --fp16 it must be asked for; the ledger counts 4 bytes for both."""
    flag = "--accumulate-allreduce-grads-in-fp32"
    assert flag in _words(_source("megatron", dtype="float16", tensor=2))
    assert flag not in _words(_source("megatron", tensor=2))


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("fp8", "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"),
        ("mxfp8", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8"),
        ("nvfp4", "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4"),
    ],
)
def test_megatron_computes_in_the_plans_precision(precision: str, flags: str) -> None:
    source = _source("megatron", precision=precision, tensor=2)
    assert source.plan.precision == precision
    assert flags in _words(source)
    alone = {"fp8": "--fp8-param-gather", "nvfp4": "--fp4-param-gather"}.get(precision, "--fp8-param-gather --reuse-")
    assert alone in _words(source)
    whole = _source("megatron", precision=precision, tensor=2, sharding="none")
    assert "-param-gather" not in _words(whole), "it needs the distributed optimizer"


def test_torchtitan_is_told_of_the_plans_precision() -> None:
    fixed = {"tensor": 1, "stages": 1, "data": 16, "sharding": "weights"}
    notes = "Linear layers but the head compute in fp8 in the plan"
    texts = [format_named("torchtitan").write(_source("fsdp", precision=each, **fixed)) for each in ("fp8", None)]
    assert [notes in " ".join(text.replace("#", "").split()) for text in texts] == [True, False]


@pytest.mark.parametrize(("engine", "precision"), [("deepspeed", "fp8"), ("fsdp", "nvfp4")])
def test_an_engine_that_lacks_a_precision_says_which_has_it(engine: str, precision: str) -> None:
    with pytest.raises(InvalidInputError, match=f"left out for the engine {engine}: megatron.* can compute in it"):
        _source(engine, precision=precision, tensor=1)


def test_deepspeed_has_a_topology_for_tensor_groups() -> None:
    source = _source("deepspeed", tensor=2, stages=2, data=4, sharding="optimizer")
    document = json.loads(format_named("deepspeed").write(source))
    assert document["pipeline"]["topology"] == {"num_pp": 2, "num_mp": 2, "num_dp": 4}
    assert document["config"]["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize(("sharding", "stage"), [("gradients", 2), ("weights", 3)])
def test_deepspeed_shares_gradients_and_weights_without_a_pipeline_module(sharding: str, stage: int) -> None:
    """PipelineEngine asserts that ZeRO's stage is below 2."""
    source = _source("deepspeed", tensor=1, sharding=sharding, stages=1)
    document = json.loads(format_named("deepspeed").write(source))
    assert "pipeline" not in document
    assert document["config"]["zero_optimization"] == {"stage": stage}
