"""torchtitan: the plan's part of a job's configuration, as TOML or as Python.

"0.2" is the TOML file that the newest releases read. It is the default: most people have a release installed.
Checked against the tags v0.2.0, v0.2.1 and v0.2.2: `config/job_config.py`, `distributed/pipeline_parallel.py`,
`models/llama3/infra/parallelize.py` (v0.1.0 has no `module_fqns_per_model_part`).

"2026-08" is the Python configuration of the main branch, which has other names since 2026-08-20. Checked against commit
b5bcd76c6 of 2026-08-21: `config/configs.py`, `trainer.py`, `distributed/pipeline_parallel.py`,
`distributed/activation_checkpoint.py`, `components/optimizer/optimizer.py`.
"""

import json
from dataclasses import dataclass

from pipeplan.errors import InvalidInputError
from pipeplan.exports.nodes import commented
from pipeplan.exports.source import ExportSource, Layers, grid_notes, layers_of, require_grid

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
_SCHEDULES = {"gpipe": "GPipe", "1f1b-interleaved": "Interleaved1F1B"}

_SHARDED = (
    "Beside a pipeline torchtitan's replicas share the weights' states out (FSDP); the plan's hold them whole: expect"
    " another throughput and another use of memory than predicted.",
)

_PRECISION = "The plan is in {dtype}; torchtitan's parameters are float32, which autocast or FSDP computes in bfloat16."

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What torchtitan is to do, whatever its settings are called.

    Beside a pipeline its replicas are FSDP's shards: torchtitan has no DDP there.
    """

    notes: tuple[str, ...]
    optimizer: str
    ranks: int
    width: int
    schedule: str
    parts: tuple[Layers, ...]
    microbatch_size: int
    microbatches: int
    recompute: bool

    @property
    def pipelined(self) -> bool:
        return self.ranks > 1

    @property
    def replicate(self) -> int:
        return 1 if self.pipelined else self.width

    @property
    def shard(self) -> int:
        return self.width if self.pipelined else 1

    @property
    def samples(self) -> int:
        """In a step, of all replicas."""
        return self.microbatch_size * self.microbatches * self.width


def write_toml(source: ExportSource) -> str:
    """The file. Raises InvalidInputError for what torchtitan has no setting for."""
    job = _job(source)
    inside = job.microbatches if job.pipelined else 1  # without a pipeline a forward takes the whole local batch
    notes = [*job.notes, "For torchtitan 0.2, which reads jobs from TOML (--job.config_file)."]
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
            "",
            "[optimizer]",
            f"name = {json.dumps(job.optimizer)}",
            "",
            "[parallelism]",
            f"data_parallel_replicate_degree = {job.replicate}",
            f"data_parallel_shard_degree = {job.shard}",
            "tensor_parallel_degree = 1",
            f"pipeline_parallel_degree = {job.ranks}",
            *pipeline,
            "",
            "[activation_checkpoint]",
            f"mode = {json.dumps('full' if job.recompute else 'none')}",
            "",
        ]
    )


def write_python(source: ExportSource) -> str:
    """The module. Raises InvalidInputError for what torchtitan has no setting for."""
    job = _job(source)
    notes = [
        *job.notes,
        "For torchtitan's main branch of 2026-08, whose configurations are Python: set BASE below.",
    ]
    settings: dict[str, object] = {
        "training.num_tokens_per_microbatch_per_dp_rank": f"{job.microbatch_size} * length",
        "training.num_tokens_per_train_step": f"{job.samples} * length",
        "parallelism.data_parallel_replicate_degree": job.replicate,
        "parallelism.data_parallel_shard_degree": job.shard,
        "parallelism.tensor_parallel_degree": 1,
        "parallelism.pipeline_parallel_degree": job.ranks,
    }
    if job.pipelined:
        parts = "".join(f"        {_modules(part, head='lm_head')!r},\n" for part in job.parts)
        settings |= {
            "training.disable_cuda_graphs": True,  # refused beside a pipeline otherwise
            "parallelism.pipeline_parallel_schedule": repr(job.schedule),
            "parallelism.num_pp_microbatches": job.microbatches,
            "parallelism.module_fqns_per_model_part": f"[\n{parts}    ]",
        }
    full = "from torchtitan.distributed.activation_checkpoint import FullAC"
    return commented(notes) + _PYTHON.format(
        imports=f"\n{full}\n" if job.recompute else "",
        settings="\n".join(f"    config.{name} = {value}" for name, value in settings.items()),
        optimizer=job.optimizer,
        checkpointing="FullAC.Config()" if job.recompute else "None",
    )


def _job(source: ExportSource) -> _Job:
    width = require_grid(source, "torchtitan")
    plan = source.plan
    optimizer = _OPTIMIZERS.get(plan.optimizer)
    if optimizer is None:
        raise InvalidInputError("format", "cannot be torchtitan: it trains with Adam and AdamW only", plan.optimizer)
    parts, assumed = layers_of(source)
    ranks = source.pipeline_ranks
    notes = (
        *source.heading,
        *assumed,
        *grid_notes(source, "torchtitan", runs=("1f1b", "data-parallel", "gpipe", "1f1b-interleaved")),
        *(_SHARDED if ranks > 1 and width > 1 else ()),
        "Modules have the names of torchtitan's own language models; the model, data, learning rate and sequence"
        " length are not the plan's.",
        *([_PRECISION.format(dtype=plan.dtype)] if plan.dtype != "float32" else []),
    )
    return _Job(
        notes=notes,
        optimizer=optimizer,
        ranks=ranks,
        width=width,
        schedule=_SCHEDULES.get(plan.schedule, "1F1B"),
        parts=parts,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        recompute=plan.recompute,
    )


def _modules(part: Layers, *, head: str) -> list[str]:
    first = ["tok_embeddings"] if part.embedding else []
    last = ["norm", head] if part.head else []
    return [*first, *(f"layers.{index}" for index in range(part.start, part.stop)), *last]
