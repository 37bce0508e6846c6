"""Engines: the programs that train a model by a plan, and what each of them can do. Planner and runtime both read this
list.

    pipeplan    our runtime (worker_agent): every schedule, one device for each replica of a stage
    megatron    Megatron-LM (core 0.15): Shoeybi et al. 2019, Narayanan et al. 2021, Korthikanti et al. 2022; its
                distributed optimizer is Adam alone (distrib_optimizer.py)
    deepspeed   DeepSpeed with Megatron's tensor parallelism; with pipelines ZeRO-1 alone (Rajbhandari 2020)
    fsdp        PyTorch's fully sharded data parallelism, as torchtitan and llm-foundry run it (Zhao et al. 2023);
                torch's Schedule1F1B refuses fewer microbatches than stages

Sharding says which states are divided among replicas: `optimizer` (ZeRO-1), with it `gradients` (ZeRO-2), with
both `weights` (ZeRO-3, FSDP). Replicas may form groups, each of which has all states (hybrid sharding, HSDP: Zhao et
al. 2023, section 3.2.2): gradients are then reduced to shares in a group, and summed among groups with every backward
(torchtitan's trainer, main of 2026-08, skips neither while it accumulates).

What goes to the host (`documents.degrees`):

    megatron    activations of a single stage where nothing is run again (`cpu_offloading`; transformer_config.py of
                core 0.15 refuses the rest); the distributed optimizer's states (`--optimizer-cpu-offload`)
    deepspeed   inputs of blocks that are run again (`cpu_checkpointing`); the states of ZeRO-1 to 3
                (`offload_optimizer`; its documentation of the configuration, 2025)
    fsdp        activations (torch's `offload_wrapper`); the shares of weights, gradients and states together
                (`CPUOffloadPolicy`; documentation of torch 2.7)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeplan.documents.degrees import OFFLOADS, offloads_activations, offloads_optimizer
from pipeplan.documents.forms import Form
from pipeplan.errors import require, require_one_of

SHARDINGS = ("none", "optimizer", "gradients", "weights")

OUR_RUNTIME = "pipeplan"

HOST_S = 5e-5
"""A host's seconds for an operation of a PyTorch program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """The time of a block in an engine beyond its kernels, fitted to measured iterations (docs/benchmarks.md).

    The host needs `host_s` to launch an operation, the device `gap_s` from one kernel to the next. An exchange that
    overlaps the compute slows the compute by the share `beside` of the exchange's own time. Of the exchanges of tensor
    groups that share tokens, the share `tensor_hidden` runs beside the products that need or make the data.
    """

    host_s: float = 0.0
    gap_s: float = 0.0
    beside: float = 0.0
    tensor_hidden: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEngine:
    """What an engine runs."""

    name: str
    axes: tuple[str, ...] = ()
    """The degrees of a form that it can have above 1."""

    whole_experts: bool = False
    """Whether devices of a tensor group can hold whole experts, and dispatch their own tokens to them.

    It then sends tokens by DeepEP where that runs (`costs.groups.sends_tokens_once`).
    """

    sequence_parallel: bool = False
    schedules: tuple[str, ...] | None = None
    """The schedules that it runs; None: all."""

    shardings: tuple[str, ...] = ("none",)
    """What replicas of a single stage can share out."""

    pipelined_shardings: tuple[str, ...] = ("none",)
    """What replicas of several stages can share out."""

    sharded_optimizers: tuple[str, ...] | None = None
    """The optimizers whose states replicas can share out; None: all."""

    precisions: tuple[str, ...] = ()
    """What its linear layers can compute in (`documents.profile.PRECISIONS`), besides the dtype of the weights."""

    keeps_narrow: bool = False
    """Whether it keeps weights in a narrow precision, in rows and columns, from one update to the next: alone where the
    devices share out the optimizer, otherwise beside the weights in the profile's dtype.
    """

    recomputes: tuple[str, ...] = ("block", "attention")
    """What it can run again at a time (`documents.plan.RECOMPUTE_UNITS`)."""

    fills_pipelines: bool = False
    """Whether 1F1B needs a microbatch for every rank, at least."""

    overlaps: bool = False
    """Whether replicas exchange gradients while the backward goes on."""

    replicates: bool = False
    """Whether groups of replicas can each have all states that are shared out."""

    graphs: bool = False
    """Whether the host can launch a layer as CUDA graphs. Nothing of it may then be run again as a whole, nor be on the
    host from forward to backward (Megatron-LM core 0.16, `transformer_config.py`).
    """

    overlaps_a2a: bool = False
    """Whether experts' all-to-all can run beside the compute of another microbatch (`cannot_overlap_a2a`)."""

    gathers_for_forward: bool = False
    """Whether replicas that share out gradients get whole weights for every forward, not once they are updated."""

    times: EngineTimes = EngineTimes()
    offloads_optimizer: bool = False
    """Whether the host's memory can hold states that are shared out."""

    offloads_activations: tuple[str, ...] = ()
    """Of which recomputation the host's memory can hold what is kept, by the unit that is run again."""

    offloads_of_pipelines: bool = False
    """Whether it can hold activations of several stages, too."""

    offloads_layers: bool = False
    """Whether it can hold the activations of some of the layers alone."""

    optimizer: str = "adamw"
    """What plans are made for unless asked otherwise: for other engines the one that large language models are
    trained with, for our runtime its own default.
    """

    def require_precision(self, precision: str | None, field: str = "precision") -> None:
        """Raises InvalidInputError for a precision in which this engine's linear layers cannot compute."""
        able = ", ".join(each.name for each in ENGINES.values() if precision in each.precisions)
        rule = f"must be left out for the engine {self.name}: {able or 'none'} can compute in it"
        require(precision is None or precision in self.precisions, field, rule, precision)


ENGINES: Mapping[str, TrainingEngine] = {
    each.name: each
    for each in (
        TrainingEngine(name=OUR_RUNTIME, recomputes=("stage", "block"), overlaps=True, optimizer="sgd"),
        TrainingEngine(
            name="megatron",
            axes=("tensor", "context", "expert"),
            whole_experts=True,
            sequence_parallel=True,
            overlaps=True,
            schedules=("data-parallel", "1f1b", "1f1b-interleaved"),
            shardings=("none", "optimizer"),
            pipelined_shardings=("none", "optimizer"),
            sharded_optimizers=("adam", "adamw"),
            precisions=("fp8", "mxfp8", "nvfp4"),
            keeps_narrow=True,
            recomputes=("block", "attention", "modules"),
            graphs=True,
            overlaps_a2a=True,
            offloads_optimizer=True,
            offloads_activations=("none",),
            offloads_layers=True,
            times=EngineTimes(host_s=HOST_S, tensor_hidden=0.6),
        ),
        TrainingEngine(
            name="deepspeed",
            axes=("tensor", "expert"),
            schedules=("data-parallel", "1f1b"),
            shardings=SHARDINGS,
            pipelined_shardings=("none", "optimizer"),
            recomputes=("block",),
            offloads_optimizer=True,
            offloads_activations=("block",),
            offloads_of_pipelines=True,
            times=EngineTimes(host_s=HOST_S, gap_s=2e-6),
        ),
        TrainingEngine(
            name="fsdp",
            axes=("tensor", "context", "expert"),
            whole_experts=True,
            sequence_parallel=True,
            schedules=("data-parallel", "1f1b", "1f1b-interleaved"),
            shardings=("gradients", "weights"),
            pipelined_shardings=("gradients", "weights"),
            precisions=("fp8", "mxfp8"),
            recomputes=("block", "operation"),
            fills_pipelines=True,
            replicates=True,
            gathers_for_forward=True,
            offloads_optimizer=True,
            offloads_activations=("none", "attention", "operation", "block"),
            offloads_of_pipelines=True,
            offloads_layers=True,
            times=EngineTimes(host_s=HOST_S, beside=0.4),
        ),
    )
}


def engine_named(name: str) -> TrainingEngine:
    """The engine of this name. Raises InvalidInputError where there is none."""
    require_one_of(ENGINES, "engine", name)
    return ENGINES[name]


def with_optimizer(engine: TrainingEngine, optimizer: str) -> TrainingEngine:
    """The engine as it trains with this optimizer: without sharding where it cannot share out the states."""
    if engine.sharded_optimizers is None or optimizer in engine.sharded_optimizers:
        return engine
    return replace(engine, shardings=SHARDINGS[:1], pipelined_shardings=SHARDINGS[:1])


def require_sharding(engine: TrainingEngine, sharding: str, *, pipelined: bool, field: str = "sharding") -> None:
    """Raises InvalidInputError for a sharding that the engine does not have."""
    known = engine.pipelined_shardings if pipelined else engine.shardings
    rule = f"must be one of {', '.join(known)} for the engine {engine.name}{' with several stages' * pipelined}"
    require(sharding in known, field, rule, sharding)


def require_replicate(
    engine: TrainingEngine, replicate: int, *, data: int | None, together: int, field: str = "replicate"
) -> None:
    """Raises InvalidInputError for groups that the engine does not have, or into which replicas cannot be divided.

    `together`: the replicas that have whole copies of the experts among them.
    """
    able = ", ".join(each.name for each in ENGINES.values() if each.replicates)
    rule = f"must be 1 for the engine {engine.name}: only {able} has groups of replicas that each share the states"
    require(engine.replicates or replicate == 1, field, rule, replicate)
    experts = f", {together} of them with all experts" * (together > 1)
    rule = f"must divide the {data} replicas (data) into groups of several{experts}"
    fits = data is None or replicate == 1 or (data % (replicate * together) == 0 and data > replicate)
    require(fits, field, rule, replicate)


def cannot_graph(engine: TrainingEngine, *, recompute: str, offload: str) -> str | None:
    """The rule by which the engine cannot launch graphs where this is run again and offloaded; None if it can."""
    able = ", ".join(each.name for each in ENGINES.values() if each.graphs)
    if not engine.graphs:
        return f"must be off for the engine {engine.name}: only {able} launches layers as CUDA graphs"
    if recompute == "block":
        return "must be off where whole blocks run again"
    return "must be off where activations are offloaded" if offloads_activations(offload) else None


def cannot_overlap_a2a(
    engine: TrainingEngine, form: Form, *, recompute: str, pipelined: bool, interleaved: bool
) -> str | None:
    """The rule by which experts' all-to-all cannot run beside another microbatch's compute; None if it can.

    Megatron-LM core 0.16, `transformer_config.py`: forwards and backwards run in pairs, of one stage or interleaved.
    """
    able = ", ".join(each.name for each in ENGINES.values() if each.overlaps_a2a)
    if not engine.overlaps_a2a:
        return f"must be off for the engine {engine.name}: only {able} overlaps experts' all-to-all"
    if form.expert == 1:
        return "must be off without expert parallelism"
    if recompute == "block":
        return "must be off where whole blocks run again"
    return "must be off for pipelines whose ranks hold one stage each" if pipelined and not interleaved else None


def cannot_offload(
    engine: TrainingEngine, offload: str, *, sharding: str, recompute: str, pipelined: bool
) -> str | None:
    """The rule by which the engine cannot offload in this way; None if it can. `recompute` is what runs again."""
    if offloads_optimizer(offload):
        if not engine.offloads_optimizer:
            return f"must be none for the engine {engine.name}, which offloads nothing"
        if sharding == SHARDINGS[0]:
            return f"must leave the optimizer's states, which {engine.name} offloads where they are sharded"
    if offloads_activations(offload):
        known = engine.offloads_activations
        if recompute not in known:
            again = f", which offloads them where it recomputes {' or '.join(known)}" if known else ""
            return f"must leave the activations for the engine {engine.name}{again}"
        if pipelined and not engine.offloads_of_pipelines:
            return f"must leave the activations for the engine {engine.name} with several stages"
    return None


def require_offload(engine: TrainingEngine, offload: str, *, sharding: str, recompute: str, pipelined: bool) -> None:
    """Raises InvalidInputError for an offloading that the engine does not have."""
    require(offload in OFFLOADS, "offload", f"must be one of {', '.join(OFFLOADS)}", offload)
    rule = cannot_offload(engine, offload, sharding=sharding, recompute=recompute, pipelined=pipelined)
    require(rule is None, "offload", rule or "", offload)


def require_offload_share(engine: TrainingEngine, offload: str, share: float, field: str = "offload_share") -> None:
    """Raises InvalidInputError for a share of the layers that cannot have its activations on the host."""
    require(0 < share <= 1, field, "must be above 0 and at most 1", share)
    require(share == 1 or offloads_activations(offload), field, "must be 1 where no activations are offloaded", share)
    rule = f"must be 1 for the engine {engine.name}, which offloads the activations of all layers or of none"
    require(share == 1 or engine.offloads_layers, field, rule, share)


def require_form(engine: TrainingEngine, form: Form) -> None:
    """Raises InvalidInputError for a form that the engine does not run."""
    for axis in ("tensor", "context", "expert"):
        rule = f"must be 1 for the engine {engine.name}, which has no {axis} parallelism"
        require(axis in engine.axes or getattr(form, axis) == 1, axis, rule, getattr(form, axis))
    rule = f"must be the tensor degree for the engine {engine.name}"
    require(engine.whole_experts or form.expert_tensor is None, "expert_tensor", rule, form.expert_tensor)
    rule = f"must be off for the engine {engine.name}, which has none"
    require(engine.sequence_parallel or not form.sequence_parallel, "sequence_parallel", rule, form.sequence_parallel)


def require_degrees(engine: TrainingEngine, devices: int, degrees: Mapping[str, int]) -> None:
    """Raises InvalidInputError for a form's degree that the engine does not run, or that divides no devices."""
    for axis, degree in degrees.items():
        others = ", ".join(each.name for each in ENGINES.values() if axis in each.axes)
        rule = (
            f"must be 1 for the engine {engine.name}, which has no {axis} parallelism (engines that have it: {others})"
        )
        require(axis in engine.axes or degree == 1, axis, rule, degree)
        require(devices % degree == 0, axis, f"must divide the cluster's {devices} devices", degree)


def require_executable(engine: str) -> None:
    """Raises InvalidInputError for a plan's engine whose plans our runtime does not execute."""
    rule = f"must be {OUR_RUNTIME} to be run here: this plan is for another engine; export it"
    require(engine == OUR_RUNTIME, "plan.engine", rule, engine)
