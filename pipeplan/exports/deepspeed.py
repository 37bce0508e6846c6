"""DeepSpeed: the configuration, the arguments of its PipelineModule, and notes, as one JSON document.

ZeRO-2 and ZeRO-3 have no PipelineModule: DeepSpeed refuses them there, even with one stage. Checked against DeepSpeed
0.19.5: `runtime/pipe/module.py`, `runtime/pipe/engine.py`, `runtime/pipe/topology.py`, `runtime/config.py`.
"""

import json
from typing import Any

from pipeplan.costs.ledger import sums_in_float32
from pipeplan.documents.degrees import offloads_activations, offloads_optimizer
from pipeplan.documents.engines import SHARDINGS
from pipeplan.errors import require
from pipeplan.exports.source import ExportSource, grid_notes, require_grid

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "SGD", "params": {"momentum": 0.0}},
    "momentum": {"type": "SGD", "params": {"momentum": 0.9}},
    "adam": {"type": "Adam", "params": {"adam_w_mode": False}},
    "adamw": {"type": "AdamW", "params": {}},
}
_PRECISIONS = {"bfloat16": {"bf16": {"enabled": True}}, "float16": {"fp16": {"enabled": True}}}


_PIPELINED = ("none", "optimizer")
"""The states that PipelineModule's replicas may share."""

_PIPELINE_NOTES = (
    "`config` is DeepSpeed's configuration; num_stages and activation_checkpoint_interval are PipelineModule's.",
    "PipelineModule has no argument for given cuts: let a subclass's _partition_layers set self.parts to `parts`"
    " and call _set_bounds with its stage's two numbers; layers are the plan's blocks, one each.",
)
_WHOLE = (
    "`config` is DeepSpeed's configuration. ZeRO-2 and ZeRO-3 take no PipelineModule: give deepspeed.initialize the"
    " model as it is, which checkpoints "
)
_ON_HOST = (
    "Only deepspeed.checkpointing.checkpoint has cpu_checkpointing, and only once your program has called"
    " deepspeed.checkpointing.configure(mpu, deepspeed_config=config), with mpu None without tensor parallelism."
)
_TENSOR = (
    "Tensor parallelism is the model's own: its layers are Megatron's, by the mpu that deepspeed.initialize gets; in a"
    " PipelineModule by topology=PipeModelDataParallelTopology(**topology) in place of num_stages."
)
_TIED = "The embedding and the head share weights in the plan: declare both as a TiedLayerSpec of one key."


def write(source: ExportSource) -> str:
    """The document. Raises InvalidInputError for a plan whose stages have different replicas, or that interleaves."""
    width = require_grid(source, "deepspeed", "deepspeed")
    plan = source.plan
    rule = "cannot be deepspeed: its pipeline does not interleave, and this plan's ranks hold several stages each"
    require(plan.chunks == 1, "format", rule, f"{plan.chunks} stages a rank")
    rule = "cannot be deepspeed: experts are shared out by the model's own MoE layers there (ep_size)"
    require(plan.form.expert == 1, "format", rule, f"expert {plan.form.expert}")
    on_host = {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offloads_optimizer(plan.offload) else {}
    untested = not plan.optimizer.startswith("adam")  # ZeRO asserts Adam unless this is allowed
    summed = sums_in_float32(plan.dtype, plan.sharding) and not on_host
    zero = {"stage": SHARDINGS.index(plan.sharding)} | on_host
    config = {
        "train_batch_size": plan.microbatch_size * plan.microbatches * width,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.microbatches,
        "optimizer": _OPTIMIZERS[plan.optimizer],
        **_PRECISIONS.get(plan.dtype, {}),
        **({"data_types": {"grad_accum_dtype": "fp32"}} if summed else {}),
        **({"zero_optimization": zero} if plan.sharding != "none" else {}),
        **({"zero_allow_untested_optimizer": True} if plan.sharding != "none" and untested else {}),
        **({"activation_checkpointing": {"cpu_checkpointing": True}} if offloads_activations(plan.offload) else {}),
    }
    notes = [
        *source.heading,
        *(
            _PIPELINE_NOTES
            if plan.sharding in _PIPELINED
            else [_WHOLE + ("every layer." if plan.recompute else "no layer.")]
        ),
        *([_ON_HOST] if offloads_activations(plan.offload) else []),
        *([_TENSOR] if plan.form.tensor > 1 else []),
        *([_TIED] if source.tied and plan.sharding in _PIPELINED else []),
        *grid_notes(source, "DeepSpeed"),
        f"Start it on {plan.workers} ranks.",
        "The learning rate is not the plan's: add it to optimizer.params.",
    ]
    pipeline = {"pipeline": pipeline_of(source, width)} if plan.sharding in _PIPELINED else {}
    return json.dumps({"notes": notes, "config": config, **pipeline}, indent=2) + "\n"


def pipeline_of(source: ExportSource, width: int) -> dict[str, Any]:
    """The arguments of PipelineModule. Its topology has tensor groups innermost, then replicas, then stages."""
    plan, tensor = source.plan, source.plan.form.tensor
    longest = max(stage.stop - stage.start for stage in plan.stages)
    return {
        "num_stages": plan.depth,
        "data_parallel_degree": width,
        **({"topology": {"num_pp": plan.depth, "num_mp": tensor, "num_dp": width}} if tensor > 1 else {}),
        "activation_checkpoint_interval": 1 if plan.recomputes_by_block else longest if plan.recompute else 0,
        "parts": [stage.start for stage in plan.stages] + [plan.stages[-1].stop],
        "stages": [
            {"blocks": list(source.block_names[stage.start : stage.stop]), "recompute": stage.recompute}
            | ({"recompute_unit": stage.recompute_unit} if stage.recompute_unit == "block" else {})
            for stage in plan.stages
        ],
    }
