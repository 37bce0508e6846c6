"""torchtitan: the plan's part of a job's configuration, as TOML or as Python.

"0.2" is the TOML file that the newest releases read. It is the default, because most people have a release installed.
Checked against the tags v0.2.0, v0.2.1 and v0.2.2: `config/job_config.py`, `distributed/pipeline_parallel.py`,
`models/llama3/infra/parallelize.py` (v0.1.0 has no `module_fqns_per_model_part`).

"2026-08" is the Python configuration of the main branch. Its names changed on 2026-08-20. Checked against commit
b5bcd76c6 of 2026-08-21: `config/configs.py`, `trainer.py`, `distributed/pipeline_parallel.py`,
`distributed/activation_checkpoint.py`, `components/optimizer/optimizer.py`.
"""

import json
from dataclasses import dataclass

from pipeplan.costs.groups import sends_tokens_once
from pipeplan.documents.degrees import offloads_activations, offloads_optimizer
from pipeplan.documents.engines import engine_named
from pipeplan.errors import InvalidInputError, require
from pipeplan.exports.nodes import commented
from pipeplan.exports.source import ExportSource, Layers, grid_notes, layers_of, require_grid

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
_RESHARD = {"weights": "always", "gradients": "never"}
"""By sharding. In a pipeline, weights stay whole until a batch ends, whatever is sharded."""

_SCHEDULES = {"gpipe": "GPipe", "1f1b-interleaved": "Interleaved1F1B"}

_SHARDED = (
    "With a pipeline torchtitan's replicas shard the weights' states (FSDP); the plan's replicas hold them whole: "
    "expect another throughput and another use of memory than predicted.",
)

_GRADIENTS = (
    "The plan exchanges gradients in {dtype}; torchtitan reduces them in float32, which takes up to twice as long."
)
_PRECISION = "The plan is in {dtype}; torchtitan's parameters are float32, which autocast or FSDP computes in bfloat16."
_NARROW = (
    "Linear layers but the head compute in {precision} in the plan: set torchtitan's converter of torchao for that, and"
    " compile the model."
)

_TIED = (
    "The embedding and the head share weights in the plan; torchtitan refuses models that tie weights"
    " (enable_weight_tying) in a pipeline."
)

_PYTHON = '''"""What a plan of pipeplan decides in a torchtitan configuration: --module THIS_MODULE --config planned."""

from importlib import import_module
{imports}
BASE = ""  # the configuration to start from, such as "torchtitan.models.llama3.config_registry:llama3_8b"


def planned():
    """The configuration that BASE names, with what the plan decides."""
    if not BASE:
        raise ValueError("BASE must name a configuration as package.module:function")
    module, _, function = BASE.partition(":")
    return with_plan(getattr(import_module(module), function)())


def with_plan(config):
    """The configuration with what the plan decides; a sample has as many tokens as its longest context."""
    length = config.training.max_context_length
{settings}
    for group in config.optimizer.param_groups:
        group.optimizer_name = {optimizer!r}
    config.activation_checkpoint = {checkpointing}
    return config
'''

_MODES = {None: "none", "block": "full", "operation": "selective"}
_CLASSES = {"block": "FullAC", "operation": "SelectiveAC"}
"""What it checkpoints, by what is run again at a time: in its older configuration, and in its newer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What torchtitan should do, independent of the names of its settings.

    With a pipeline its replicas are FSDP's shards: torchtitan has no DDP there. So are those of a plan for FSDP, which
    also says when weights are resharded (`reshard`), the type of the compute (`computes_in`), and whether shards and
    optimizer are on the host.
    """

    notes: tuple[str, ...]
    optimizer: str
    ranks: int
    width: int
    groups: int
    schedule: str
    parts: tuple[Layers, ...]
    microbatch_size: int
    microbatches: int
    recompute: str | None
    tensor: int
    sequence_parallel: bool
    context: int
    expert: int
    expert_tensor: int
    sent_once: bool
    reshard: str | None
    computes_in: str | None
    on_host: bool

    @property
    def pipelined(self) -> bool:
        return self.ranks > 1

    @property
    def replicate(self) -> int:
        return self.width // self.shard

    @property
    def shard(self) -> int:
        return self.width // self.groups if self.pipelined or self.reshard is not None else 1

    @property
    def parallelism(self) -> dict[str, int | str]:
        """The settings that have the same names in all versions."""
        return {
            "data_parallel_replicate_degree": self.replicate,
            "data_parallel_shard_degree": self.shard,
            "tensor_parallel_degree": self.tensor,
            **({"context_parallel_degree": self.context} if self.context > 1 else {}),
            **({"expert_parallel_degree": self.expert} if self.expert > 1 else {}),
            **({"fsdp_reshard_after_forward": self.reshard} if self.reshard is not None else {}),
            "pipeline_parallel_degree": self.ranks,
        }

    @property
    def samples(self) -> int:
        """In a step, of all replicas."""
        return self.microbatch_size * self.microbatches * self.width


def write_toml(source: ExportSource) -> str:
    """The file. Raises InvalidInputError for anything without a setting in torchtitan."""
    job = _job(source)
    rule = "cannot be torchtitan 0.2, where tensor parallelism always shares tokens as well (sequence parallelism)"
    require(job.tensor == 1 or job.sequence_parallel, "format", rule, f"tensor {job.tensor}")
    inside = job.microbatches if job.pipelined else 1  # without a pipeline a forward takes the whole local batch
    inner = job.context * (job.tensor if job.expert_tensor < job.tensor else 1)
    anywhere = job.expert == 1 or (job.expert % inner == 0 and not job.sent_once)
    release = "0.2" if anywhere else "0.2.1 and later"
    notes = [*job.notes, f"For torchtitan {release}, which reads jobs from TOML (--job.config_file)."]
    pipeline = []
    if job.pipelined:
        parts = ",\n".join(f"  {json.dumps(_modules(part, head='output'))}" for part in job.parts)
        pipeline = [
            f"pipeline_parallel_schedule = {json.dumps(job.schedule)}",
            f"pipeline_parallel_microbatch_size = {job.microbatch_size}",
            f"module_fqns_per_model_part = [\n{parts},\n]",
        ]
    return commented(notes) + "\n".join(
        [
            "[training]",
            f"local_batch_size = {job.microbatch_size * inside}",
            f"global_batch_size = {job.samples}",
            *([f"mixed_precision_param = {json.dumps(job.computes_in)}"] if job.computes_in is not None else []),
            *(["enable_cpu_offload = true"] if job.on_host else []),
            "",
            "[optimizer]",
            f"name = {json.dumps(job.optimizer)}",
            "",
            "[parallelism]",
            *(f"{name} = {json.dumps(value)}" for name, value in job.parallelism.items()),
            *([f"expert_tensor_parallel_degree = {job.expert_tensor}"] if job.expert > 1 else []),
            *(['expert_parallel_comm_backend = "deepep"'] * job.sent_once),
            *pipeline,
            "",
            "[activation_checkpoint]",
            f"mode = {json.dumps(_MODES[job.recompute])}",
            *(['selective_ac_option = "op"'] if job.recompute == "operation" else []),
            "",
        ]
    )


def write_python(source: ExportSource) -> str:
    """The module. Raises InvalidInputError for anything without a setting in torchtitan."""
    job = _job(source)
    rule = "cannot be torchtitan's main branch, whose devices hold whole experts (expert_tensor 1)"
    require(job.expert == 1 or job.expert_tensor == 1, "format", rule, f"expert_tensor {job.expert_tensor}")
    notes = [
        *job.notes,
        "For torchtitan's main branch of 2026-08, whose configurations are Python: set BASE below.",
    ]
    settings: dict[str, object] = {
        "training.num_tokens_per_microbatch_per_dp_rank": f"{job.microbatch_size} * length",
        "training.num_tokens_per_train_step": f"{job.samples} * length",
        **{f"parallelism.{name}": repr(value) for name, value in job.parallelism.items()},
    }
    if job.computes_in is not None:
        settings["training.mixed_precision_param"] = repr(job.computes_in)
    if job.on_host:
        settings["training.enable_cpu_offload"] = True
    if job.tensor > 1:
        settings["parallelism.enable_sequence_parallel"] = job.sequence_parallel
    if job.pipelined:
        parts = "".join(f"        {_modules(part, head='lm_head')!r},\n" for part in job.parts)
        settings |= {
            "training.disable_cuda_graphs": True,  # refused beside a pipeline otherwise
            "parallelism.pipeline_parallel_schedule": repr(job.schedule),
            "parallelism.num_pp_microbatches": job.microbatches,
            "parallelism.module_fqns_per_model_part": f"[\n{parts}    ]",
        }
    kind = _CLASSES.get(job.recompute or "")
    return commented(notes) + _PYTHON.format(
        imports=f"\nfrom torchtitan.distributed.activation_checkpoint import {kind}\n" if kind else "",
        settings="\n".join(f"    config.{name} = {value}" for name, value in settings.items()),
        optimizer=job.optimizer,
        checkpointing=f"{kind}.Config()" if kind else "None",
    )


def _job(source: ExportSource) -> _Job:
    width = require_grid(source, "torchtitan", "fsdp")
    plan, sharded = source.plan, source.plan.engine == "fsdp"
    rule = "cannot be torchtitan: it recomputes layers or most of them, and this plan only attention's core"
    require(not source.recomputes_attention, "format", rule, "attention")
    rule = "cannot be torchtitan: it has no setting that leaves activations to the host, and this plan does"
    require(not offloads_activations(plan.offload), "format", rule, plan.offload)
    rule = "cannot be torchtitan, which computes in bfloat16 or float32"
    require(not sharded or plan.dtype in ("bfloat16", "float32"), "format", rule, plan.dtype)
    optimizer = _OPTIMIZERS.get(plan.optimizer)
    if optimizer is None:
        raise InvalidInputError("format", "cannot be torchtitan: it trains with Adam and AdamW only", plan.optimizer)
    once = sends_tokens_once(engine_named("fsdp"), plan.form, source.cluster.device.name)
    parts, assumed = layers_of(source)
    ranks, schedule = source.pipeline_ranks, _SCHEDULES.get(plan.schedule, "1F1B")
    rule = f"cannot be torchtitan: its 1F1B needs a microbatch for each of the {ranks} stages, at least"
    require(schedule != "1F1B" or plan.microbatches >= ranks, "format", rule, f"{plan.microbatches} microbatches")
    notes = (
        *source.heading,
        *assumed,
        *grid_notes(source, "torchtitan", runs=("1f1b", "data-parallel", "gpipe", "1f1b-interleaved")),
        *([_TIED] if source.tied and ranks > 1 else []),
        *(_SHARDED if ranks > 1 and width > 1 and not sharded else ()),
        *([f"Start it on {plan.workers} ranks."] if sharded else []),
        "Modules have the names of torchtitan's own language models; the model, data, learning rate and sequence"
        " length are not the plan's.",
        *(["Tokens are sent once to each node, by DeepEP: build the model with its dispatcher."] * once),
        *([_NARROW.format(precision=plan.precision)] if plan.precision else []),
        *([] if plan.dtype == "float32" else [(_GRADIENTS if sharded else _PRECISION).format(dtype=plan.dtype)]),
    )
    return _Job(
        notes=notes,
        optimizer=optimizer,
        ranks=ranks,
        width=width,
        groups=plan.replicate,
        schedule=schedule,
        parts=parts,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        recompute="operation" if "by operation" in plan.recomputes else "block" if plan.recompute else None,
        tensor=plan.form.tensor,
        sequence_parallel=plan.form.sequence_parallel,
        context=plan.form.context,
        expert=plan.form.expert,
        expert_tensor=plan.form.expert_tensor_degree,
        sent_once=once,
        reshard=_RESHARD["gradients" if ranks > 1 else plan.sharding] if sharded else None,
        computes_in=plan.dtype if sharded else None,
        on_host=offloads_optimizer(plan.offload),
    )


def _modules(part: Layers, *, head: str) -> list[str]:
    first = ["tok_embeddings"] if part.embedding else []
    last = ["norm", head] if part.head else []
    return [*first, *(f"layers.{index}" for index in range(part.start, part.stop)), *last]
