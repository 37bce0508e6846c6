"""torchtitan: the plan's part of a job's TOML file."""

import json

from planner_service.core.errors import InvalidInputError
from planner_service.exports.node_script import commented
from planner_service.exports.source import Layers, Source, grid_notes, layers_of, require_grid

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
_SCHEDULES = {"gpipe": "GPipe"}


def write(source: Source) -> str:
    """The file. Raises InvalidInputError for what torchtitan has no setting for."""
    width = require_grid(source, "torchtitan")
    plan = source.plan
    optimizer = _OPTIMIZERS.get(plan.optimizer)
    if optimizer is None:
        raise InvalidInputError("format", "cannot be torchtitan: it trains with Adam and AdamW only", plan.optimizer)
    stages, assumed = layers_of(source)
    local = plan.microbatch_size * plan.microbatches
    notes = [
        source.title,
        "For torchtitan's releases that read jobs from TOML (--job.config_file); later ones take the same names in a"
        " Python configuration.",
        *assumed,
        *grid_notes(source, "torchtitan", runs=("1f1b", "data-parallel", "gpipe")),
        "Modules have the names of torchtitan's own language models; the model, data, learning rate and sequence"
        " length are not the plan's.",
        *_precision(plan.dtype),
    ]
    return commented(notes) + "\n".join(
        [
            "[training]",
            f"local_batch_size = {local}",
            f"global_batch_size = {local * width}",
            "",
            "[optimizer]",
            f"name = {json.dumps(optimizer)}",
            "",
            "[parallelism]",
            f"data_parallel_replicate_degree = {width}",
            "data_parallel_shard_degree = 1",
            "tensor_parallel_degree = 1",
            f"pipeline_parallel_degree = {plan.depth}",
            *(_pipeline(source, stages) if plan.depth > 1 else []),
            "",
            "[activation_checkpoint]",
            f"mode = {json.dumps('full' if plan.recompute else 'none')}",
            "",
        ]
    )


def _pipeline(source: Source, stages: tuple[Layers, ...]) -> list[str]:
    plan = source.plan
    parts = ",\n".join(f"  {json.dumps(_modules(stage))}" for stage in stages)
    return [
        f"pipeline_parallel_schedule = {json.dumps(_SCHEDULES.get(plan.schedule, '1F1B'))}",
        f"pipeline_parallel_microbatch_size = {plan.microbatch_size}",
        f"module_fqns_per_model_part = [\n{parts},\n]",
    ]


def _modules(stage: Layers) -> list[str]:
    first = ["tok_embeddings"] if stage.embedding else []
    last = ["norm", "output"] if stage.head else []
    return [*first, *(f"layers.{index}" for index in range(stage.start, stage.stop)), *last]


def _precision(dtype: str) -> list[str]:
    if dtype == "float32":
        return []
    return [
        f"The plan is in {dtype}; torchtitan's parameters are float32, which autocast or FSDP computes in bfloat16."
    ]
