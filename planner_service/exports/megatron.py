"""Megatron-LM: the plan's part of the arguments, as a bash array.

The layout of stages is `--pipeline-model-parallel-layout` (E: embedding, t: transformer layer, L: loss, | between
stages), which Megatron calls experimental; the classic first and last stage flags could not express most plans.
"""

from planner_service.core.plan import Plan
from planner_service.exports.node_script import commented
from planner_service.exports.source import Layers, Source, grid_notes, layers_of, require_grid

_OPTIMIZERS = {
    "sgd": ["--optimizer sgd", "--sgd-momentum 0.0"],
    "momentum": ["--optimizer sgd", "--sgd-momentum 0.9"],
    "adam": ["--optimizer adam"],
    "adamw": ["--optimizer adam"],
}
_PRECISIONS = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}


def write(source: Source) -> str:
    """The arguments. Raises InvalidInputError for a plan whose stages have different replicas."""
    width = require_grid(source, "megatron")
    plan = source.plan
    stages, assumed = layers_of(source)
    arguments = [
        f"--num-layers {stages[-1].stop}",
        "--tensor-model-parallel-size 1",
        f"--pipeline-model-parallel-size {plan.depth}",
        *([f"--pipeline-model-parallel-layout '{_layout(stages)}'"] if plan.depth > 1 else []),
        f"--micro-batch-size {plan.microbatch_size}",
        f"--global-batch-size {_global_batch(plan, width)}",
        *_OPTIMIZERS[plan.optimizer],
        *_PRECISIONS.get(plan.dtype, []),
        *(["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"] * plan.recompute),
    ]
    notes = [
        source.title,
        *assumed,
        *grid_notes(source, "Megatron-LM"),
        f"Start it on {plan.workers} ranks: {width} replicas of the pipeline follow from that.",
        *(["Megatron keeps every layer's input where it recomputes, the plan a stage's only."] * plan.recompute),
        *(["Megatron's adam decays weights decoupled (AdamW): --weight-decay."] * plan.optimizer.startswith("adam")),
        "The model's sizes, data, learning rate and checkpoints are not the plan's: add their arguments.",
    ]
    lines = "".join(f"  {argument}\n" for argument in arguments)
    return commented(notes) + f"MEGATRON_ARGS=(\n{lines})\n"


def _layout(stages: tuple[Layers, ...]) -> str:
    return "|".join("E" * s.embedding + _layers(s.stop - s.start) + "L" * s.head for s in stages)


def _layers(count: int) -> str:
    return "t" * count if count < 2 else f"t*{count}"


def _global_batch(plan: Plan, width: int) -> int:
    return plan.microbatch_size * plan.microbatches * width
