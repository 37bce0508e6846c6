"""Megatron-LM: the plan's part of the arguments, as a bash array.

The layout of stages is `--pipeline-model-parallel-layout` (E: embedding, t: transformer layer, L: loss, | between
stages); the older flags for the first and the last stage cannot express most plans. If there are more parts than
`--pipeline-model-parallel-size`, a rank holds several parts, like the plan's chunks, and Megatron interleaves them.

Checked against core_v0.13.0 (the first with the layout) to core_v0.19.0 and the main branch of 2026-08-22:
`megatron/training/arguments.py`, `megatron/core/transformer/pipeline_parallel_layer_layout.py`.
"""

from math import ceil

from pipeplan.costs.groups import sends_tokens_once
from pipeplan.costs.ledger import keeps_narrow_alone
from pipeplan.documents.degrees import offloads_activations, offloads_optimizer
from pipeplan.documents.engines import engine_named, with_optimizer
from pipeplan.errors import require
from pipeplan.exports.nodes import commented
from pipeplan.exports.source import ExportSource, grid_notes, layers_of, require_grid

_OPTIMIZERS = {
    "sgd": ["--optimizer sgd", "--sgd-momentum 0.0"],
    "momentum": ["--optimizer sgd", "--sgd-momentum 0.9"],
    "adam": ["--optimizer adam"],
    "adamw": ["--optimizer adam"],
}
_PRECISIONS = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}
_NARROW = {
    "fp8": ["--fp8-format hybrid", "--fp8-recipe tensorwise"],
    "mxfp8": ["--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "nvfp4": ["--fp4-format e2m1", "--fp4-recipe nvfp4"],
}
"""With Transformer Engine; the flags of 4 bits came with core 0.15."""

_NARROW_WEIGHTS = {
    "fp8": ["--fp8-param-gather"],
    "mxfp8": ["--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"],
    "nvfp4": ["--fp4-param-gather"],
}
"""Weights are kept narrow alone, and gathered so: with the distributed optimizer on the devices."""

_ALL_TO_ALL = ["--moe-token-dispatcher-type alltoall"]
_SENT_ONCE = ["--moe-token-dispatcher-type flex --moe-enable-deepep", "--moe-router-dtype fp32"]
"""How the plan's tokens reach their experts. Megatron's default gathers all tokens on every device."""

ACTIVATIONS = (
    "Activations of these layers go to the host: before Core 0.17, set cpu_offloading and cpu_offloading_num_layers"
    " in the TransformerConfig. Megatron keeps the last layer's on the device."
)
OVERLAP = (
    "All-to-all overlaps where CUDA_DEVICE_MAX_CONNECTIONS is above 1 (Hopper and before; Megatron asks for 1 with"
    " tensor or context parallelism, and for 32 here)."
)
GRAPHS = (
    "CUDA graphs need Transformer Engine and microbatches of one shape; Core 0.16 says --cuda-graph-scope for modules."
)
UNTIED = "--untie-embeddings-and-output-weights"
TIES = (
    "The profile does not say whether the embedding and the head share weights. Megatron's default is assumed:"
    f" they do. For a model where they do not, add {UNTIED}."
)


def write(source: ExportSource) -> str:
    """The arguments. Raises InvalidInputError for a plan whose stages have different replicas."""
    width = require_grid(source, "megatron", "megatron")
    plan = source.plan
    engine = with_optimizer(engine_named("megatron"), plan.optimizer)
    rule = "cannot be megatron: its distributed optimizer is Adam alone"
    require(plan.sharding in engine.shardings, "format", rule, plan.optimizer)
    stages, assumed = layers_of(source)
    layout = "|".join(
        "E" * stage.embedding + ("t" * count if count < 2 else f"t*{count}") + "L" * stage.head
        for stage, count in ((stage, stage.stop - stage.start) for stage in stages)
    )
    as_a_whole = any(stage.recomputes == "yes" for stage in plan.stages)
    dispatcher = _SENT_ONCE if sends_tokens_once(engine, plan.form, source.cluster.device.name) else _ALL_TO_ALL
    arguments = [
        f"--num-layers {stages[-1].stop}",
        f"--tensor-model-parallel-size {plan.form.tensor}",
        *(["--sequence-parallel --tp-comm-overlap"] * plan.form.sequence_parallel),
        *([f"--context-parallel-size {plan.form.context}"] if plan.form.context > 1 else []),
        *([f"--expert-model-parallel-size {plan.form.expert}", *dispatcher] if plan.form.expert > 1 else []),
        *(["--expert-tensor-parallel-size 1"] if plan.form.expert_tensor else []),
        *(["--use-distributed-optimizer --overlap-param-gather"] if plan.sharding == "optimizer" else []),
        *(["--overlap-grad-reduce"] if width > 1 or plan.sharding == "optimizer" else []),
        *(["--optimizer-cpu-offload", "--use-precision-aware-optimizer"] * offloads_optimizer(plan.offload)),
        f"--pipeline-model-parallel-size {source.pipeline_ranks}",
        *([f"--pipeline-model-parallel-layout '{layout}'"] if source.pipeline_ranks > 1 else []),
        f"--micro-batch-size {plan.microbatch_size}",
        f"--global-batch-size {plan.microbatch_size * plan.microbatches * width}",
        *_OPTIMIZERS[plan.optimizer],
        *_PRECISIONS.get(plan.dtype, []),
        *_NARROW.get(plan.precision or "", []),
        *(_NARROW_WEIGHTS.get(plan.precision or "", []) * keeps_narrow_alone(plan.sharding, plan.offload)),
        *(["--accumulate-allreduce-grads-in-fp32"] if plan.dtype == "float16" else []),  # with --bf16 it is the default
        *([UNTIED] if source.tied is False else []),
        *_of_layers(source, stages[-1].stop),
    ]
    notes = [
        *source.heading,
        "For Megatron Core 0.13 and later.",
        *assumed,
        *([TIES] if source.tied is None else []),
        *grid_notes(source, "Megatron-LM"),
        f"Start it on {plan.workers} ranks: {width} replicas of the pipeline follow from that.",
        *([GRAPHS] * bool(plan.graphs)),
        *([OVERLAP] * plan.a2a_overlap),
        *([ACTIVATIONS] * offloads_activations(plan.offload)),
        *(["Megatron keeps every layer's input where it recomputes, the plan a stage's only."] * as_a_whole),
        *(["Megatron's adam decays weights decoupled (AdamW): --weight-decay."] * plan.optimizer.startswith("adam")),
        "The model's sizes, data, learning rate and checkpoints are not the plan's: add their arguments.",
    ]
    lines = "".join(f"  {argument}\n" for argument in arguments)
    return commented(notes) + f"MEGATRON_ARGS=(\n{lines})\n"


def _of_layers(source: ExportSource, layers: int) -> list[str]:
    """What runs again of a layer, what is launched as graphs, whether all-to-all overlaps, and how many layers are
    offloaded, of `layers`.
    """
    plan, found = source.plan, list[str]()
    modules = ("core_attn",) if source.recomputes_attention else plan.recompute_modules
    if modules:
        found = [f"--recompute-granularity selective --recompute-modules {' '.join(modules)}"]
        found += ["--moe-grouped-gemm"] * ("moe_act" in modules)
    elif plan.recompute:
        found = ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    if plan.graphs:
        found += ["--cuda-graph-impl transformer_engine"]
        found += [f"--cuda-graph-modules {' '.join(plan.graphs)}"] * (plan.graphs != ("full",))
    found += ["--overlap-moe-expert-parallel-comm"] * plan.a2a_overlap
    if offloads_activations(plan.offload):
        found += [f"--cpu-offloading-num-layers {min(ceil(plan.offload_share * layers), layers - 1)}"]
    return found
