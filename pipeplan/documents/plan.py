"""Plan: a planner's answer, complete enough to be executed; or Infeasible: why there is none."""

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import ClassVar

from pipeplan.documents.certificate import Certificate
from pipeplan.documents.degrees import DegreeChoice
from pipeplan.documents.engines import (
    OUR_RUNTIME,
    cannot_graph,
    cannot_overlap_a2a,
    engine_named,
    require_form,
    require_offload,
    require_offload_share,
    require_replicate,
    require_sharding,
)
from pipeplan.documents.forms import MODULES, SELECTIVE_UNITS, WHOLE, Form
from pipeplan.documents.names import STRICT, require_line
from pipeplan.documents.profile import DTYPE_BYTES, Model, require_autocast, require_precision
from pipeplan.documents.stage_costs import StageCosts
from pipeplan.documents.stage_memory import StageMemory
from pipeplan.documents.tied import TiedStages
from pipeplan.errors import InvalidInputError, require, require_amount, require_count

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")

RECOMPUTE_UNITS = ("stage", "block", *SELECTIVE_UNITS)
"""What a stage that recomputes runs again at a time. The first is the default."""

FIRST_VERSION = "1.0.0"
"""The version of a planner in plans that do not name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks [start, stop) on `replicas` workers, with the planner's time a microbatch and memory a worker.

    If a rank holds several stages, each has its share of the rank's time and peak memory.
    `recompute`: it keeps inputs and runs its forward again. `recompute_unit` says how much of it at a time: the whole
    `stage`, of which the input is kept, one `block` after the other, of which every input is kept, or a part of every
    block (`documents.forms.Selective`).
    `device` names the type of its devices where a cluster has several. `host_bytes` is what a worker has in its host's
    memory.
    """

    start: int
    stop: int
    replicas: int = 1
    recompute: bool = False
    recompute_unit: str = "stage"
    time_s: float = 0.0
    memory_bytes: int = 0
    memory: StageMemory | None = None
    device: str | None = None
    host_bytes: int = 0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require_count("start", self.start, at_least=0)
        require(self.stop > self.start, "stop", f"must be above start ({self.start})", self.stop)
        require_count("replicas", self.replicas)
        rule = f"must be one of {', '.join(RECOMPUTE_UNITS)}"
        require(self.recompute_unit in RECOMPUTE_UNITS, "recompute_unit", rule, self.recompute_unit)
        rule = f"must be {RECOMPUTE_UNITS[0]} on a stage that does not recompute"
        require(
            self.recompute or self.recompute_unit == RECOMPUTE_UNITS[0], "recompute_unit", rule, self.recompute_unit
        )
        require_amount("time_s", self.time_s)
        require_amount("memory_bytes", self.memory_bytes)
        require_count("host_bytes", self.host_bytes, at_least=0)
        if self.device is not None:
            require_line("device", self.device)

    @property
    def recomputes(self) -> str:
        """Whether it recomputes, in a word: "no", "yes" (as a whole) or "by block"."""
        if not self.recompute:
            return "no"
        return "yes" if self.recompute_unit == RECOMPUTE_UNITS[0] else f"by {self.recompute_unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One replica of one stage. A plan's placement lists them by rank."""

    stage: int
    replica: int = 0

    __pydantic_config__: ClassVar = STRICT


_PLACE = attrgetter("stage", "replica")


@lru_cache(maxsize=8)
def _places(replicas: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    """Every (stage, replica) of stages with these replicas: clusters have thousands, and a search makes many plans."""
    return frozenset((stage, replica) for stage, count in enumerate(replicas) for replica in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """What the planner's formulas give, which the plan's `cost_model` names and its search compared.

    The time is a microbatch's of all replicas of the pipeline together, or PipeDream's minibatch's.
    """

    time_per_microbatch_s: float
    throughput_samples_per_s: float
    bubble_fraction: float

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What the instruction streams give when they are played with the plan's costs.

    If a batch is too long to play, two shorter ones were played, the longer one of `extrapolated_from` microbatches:
    time, work and memory grow with the microbatches in a straight line once the pipeline is full.

    A plan may be stored without a play because of its length, and be played later, with at most `added_within`
    instructions. Its id is that of the plan without it.
    """

    batches: int
    throughput_samples_per_s: float
    bubble_fraction: float
    busy_fraction: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    extrapolated_from: int | None = None
    added_within: int | None = None

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A configuration that was considered and not chosen, and why.

    `throughput_samples_per_s` is that of its streams, None if they were not played. `closed_form_samples_per_s` is what
    the planner's formulas give, None if they were not used or a played figure replaces theirs.
    """

    schedule: str
    depth: int
    width: int | None
    microbatch_size: int
    microbatches: int
    recompute: bool
    throughput_samples_per_s: float | None
    memory_bytes: int | None
    reason: str
    closed_form_samples_per_s: float | None = None
    form: Form = WHOLE
    sharding: str = "none"
    chunks: int = 1
    offload: str = "none"
    replicate: int = 1
    graphs: bool = False
    a2a_overlap: bool = False
    offload_share: float = 1.0

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which blocks run where, in which order, and the predictions for this.

    `microbatches` counts a batch's microbatches on one replica of the pipeline: 1 for PipeDream, whose minibatch
    is never divided. `simulated` comes from the instruction streams, played with the stages' `costs`: whoever has the
    plan can play them again, for any number of batches. It is the plan's price: `throughput_samples_per_s`,
    `bubble_fraction` and `time_per_microbatch_s` are read off it. `closed_form` is what the planner's search compared.

    - `order`: of a graph, the profile's blocks in the order in which the stages hold them; a stage's [start, stop) are
      places in it.
    - `estimated`: the profile was computed, not measured. `basis` says from what, and how far that was off elsewhere.
    - `calibration_id`: the calibration that corrected the costs.
    - `pareto`: the plans that no other beats in both throughput and memory.
    - `master_weights`: gradients of 16-bit weights add up in float32, and the optimizer works on float32 copies.
    - `split_backward`: 2BP; `split_backward_half_way`: its memory-saving variant, figure 5.
    - `chunks`: the stages that a rank holds (Narayanan et al. 2021). The placement then lists stages below
      depth / chunks alone, and the rank of stage s has the stages s, s + depth / chunks, ..., or, in a schedule's V
      (Qi et al. 2024), s and depth - 1 - s.
    - `interpolated`: the microbatch size was not measured; the costs lie between those of the two next to it that were.
    - `warnings`: sentences that say where the profile may not be of the cluster's devices, or what is priced is not
      what runs.
    - `engine`: what the plan is for; its bytes and exchanges are those of this engine.
    - `form`: how many devices share the blocks of a stage. Each entry of the placement then stands for `form.devices`
      of them, one after the other, and a stage's costs are those of one such group.
    - `sharding`: what of the states is shared out among a stage's replicas (`documents.engines`).
    - `replicate`: how many groups of replicas share the states each.
    - `offload`: what of it is in the host's memory (`documents.degrees`); `offload_share`: the share of the layers
      whose activations are, where it has activations.
    - `autocast`: what blocks with float32 weights compute in: the profile was measured so, and runs do so.
    - `precision`: what linear layers compute in, where that is not the dtype, as of a profile.
    - `tied`: the stages that share weights, of a profile that says which blocks do.
    - `recompute_modules`: of stages that recompute by modules, which (`documents.forms.MODULES`).
    - `graphs`: the parts of layers that the host launches as CUDA graphs (`ModelForm.graphs`).
    - `a2a_overlap`: experts' all-to-all runs beside the compute of another microbatch.
    - `choices`: for each degree, what other values of it would give.
    - `planner_version`: the planner with another version may answer the same request with another plan.
    """

    planner: str
    cost_model: str
    model: Model
    dtype: str
    profile_id: str
    cluster_id: str
    batch_size: int
    stages: tuple[Stage, ...]
    costs: tuple[StageCosts, ...]
    placement: tuple[Worker, ...]
    schedule: str
    microbatch_size: int
    microbatches: int
    optimizer: str
    memory_accounting: str
    closed_form: ClosedForm
    optimal_in_flight: int
    configurations_considered: int
    simulated: Simulated | None = None
    alternatives: tuple[Alternative, ...] = ()
    order: tuple[int, ...] | None = None
    certificate: Certificate | None = None
    pareto: tuple[Alternative, ...] = ()
    master_weights: bool = False
    split_backward: bool = False
    split_backward_half_way: bool = False
    chunks: int = 1
    estimated: bool = False
    interpolated: bool = False
    calibration_id: str | None = None
    warnings: tuple[str, ...] = ()
    planner_version: str = FIRST_VERSION
    engine: str = OUR_RUNTIME
    form: Form = WHOLE
    sharding: str = "none"
    offload: str = "none"
    choices: tuple[DegreeChoice, ...] = ()
    autocast: str | None = None
    tied: tuple[TiedStages, ...] = ()
    precision: str | None = None
    basis: str | None = None
    recompute_modules: tuple[str, ...] = ()
    replicate: int = 1
    graphs: tuple[str, ...] = ()
    a2a_overlap: bool = False
    offload_share: float = 1.0

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        require(self.optimizer in OPTIMIZERS, "optimizer", f"must be one of {', '.join(OPTIMIZERS)}", self.optimizer)
        require(self.dtype in DTYPE_BYTES, "dtype", f"must be one of {', '.join(DTYPE_BYTES)}", self.dtype)
        require_autocast(self.autocast, self.dtype)
        require_precision(self.precision, self.dtype)
        for name in ("planner", "schedule", "cost_model", "profile_id", "cluster_id", "memory_accounting"):
            require_line(name, getattr(self, name))
        for sentence in self.warnings:
            require_line("warnings", sentence)
        if self.basis is not None:
            require_line("basis", self.basis)
        whole = self.split_backward or not self.split_backward_half_way
        require(whole, "split_backward_half_way", "is a variant of split_backward, which must be on", True)
        rule = "must be off where a stage recomputes by block: its backward is done as a whole"
        require(not self.split_backward or not self.recomputes_by_block, "split_backward", rule, self.split_backward)
        for name in ("batch_size", "microbatch_size", "microbatches", "optimal_in_flight"):
            require_count(name, getattr(self, name))

        require(len(self.stages) > 0, "stages", "must hold at least one stage", self.stages)
        start = 0
        for i, stage in enumerate(self.stages):
            rule = f"must begin where the stage before it ends ({start})"
            require(stage.start == start, f"stages.{i}.start", rule, stage.start)
            start = stage.stop
        if self.order is not None:
            rule = f"must hold each of the {start} blocks once"
            require(sorted(self.order) == list(range(start)), "order", rule, self.order)
        rule = f"must hold one entry for each stage ({self.depth})"
        require(len(self.costs) == self.depth, "costs", rule, len(self.costs))

        for i, tied in enumerate(self.tied):
            rule = f"must be among the {self.depth} stages"
            require(tied.stages[-1] < self.depth, f"tied.{i}.stages", rule, tied.stages)

        self._require_engine()
        require_count("chunks", self.chunks)
        require(self.depth % self.chunks == 0, "chunks", f"must divide the {self.depth} stages", self.chunks)
        first_stages = self.stages[: self.depth // self.chunks]
        replicas = [stage.replicas for stage in first_stages]
        workers = sum(replicas)
        if len(self.placement) != workers or set(map(_PLACE, self.placement)) != _places(tuple(replicas)):
            rule = f"must place each of the {workers} replicas of the stages once"
            raise InvalidInputError("placement", rule, [(w.stage, w.replica) for w in self.placement])

    def _require_engine(self) -> None:
        """Raises InvalidInputError for a form, states, recomputation or graphs that the engine does not have."""
        engine = engine_named(self.engine)
        require_form(engine, self.form)
        pipelined = self.depth > 1
        require_sharding(engine, self.sharding, pipelined=pipelined)
        require_count("replicate", self.replicate)
        require_replicate(engine, self.replicate, data=self.width, together=self.form.replicas_together)
        for again in {each.recompute_unit if each.recompute else "none" for each in self.stages}:
            require_offload(engine, self.offload, sharding=self.sharding, recompute=again, pipelined=pipelined)
            graphless = cannot_graph(engine, recompute=again, offload=self.offload) if self.graphs else None
            require(graphless is None, "graphs", graphless or "", list(self.graphs))
            apart = cannot_overlap_a2a(
                engine, self.form, recompute=again, pipelined=pipelined, interleaved=self.chunks > 1
            )
            require(not self.a2a_overlap or apart is None, "a2a_overlap", apart or "", self.a2a_overlap)
        require_offload_share(engine, self.offload, self.offload_share)
        by_modules = any(stage.recompute_unit == "modules" for stage in self.stages)
        rule = f"must be some of {', '.join(MODULES)} where a stage recomputes by modules, and none elsewhere"
        known = bool(self.recompute_modules) == by_modules and set(self.recompute_modules) <= set(MODULES)
        require(known, "recompute_modules", rule, list(self.recompute_modules))

    @property
    def throughput_samples_per_s(self) -> float | None:
        """The throughput of the streams; None if they were not played."""
        return None if self.simulated is None else self.simulated.throughput_samples_per_s

    @property
    def bubble_fraction(self) -> float | None:
        """The share of the workers' time without compute when the streams are played; None if they were not."""
        return None if self.simulated is None else self.simulated.bubble_fraction

    @property
    def time_per_microbatch_s(self) -> float | None:
        """The time in which the streams give the samples of the closed form's microbatch; None without a throughput."""
        form, rate = self.closed_form, self.throughput_samples_per_s
        return form.time_per_microbatch_s * form.throughput_samples_per_s / rate if rate else None

    @property
    def depth(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def width(self) -> int | None:
        """The number of replicas, if all stages have the same; None if they differ."""
        counts = {stage.replicas for stage in self.stages}
        return counts.pop() if len(counts) == 1 else None

    @property
    def replicas(self) -> tuple[int, ...]:
        """Every stage's replicas."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def recompute(self) -> bool:
        """Whether any stage recomputes."""
        return any(stage.recompute for stage in self.stages)

    @property
    def recomputes_by_block(self) -> bool:
        """Whether any stage recomputes block by block."""
        return any(stage.recompute_unit == "block" for stage in self.stages)

    @property
    def recomputes(self) -> str:
        """Whether any stage recomputes, in a word or two: "no", "yes", "by block", or "yes, by block" for some each."""
        ways = dict.fromkeys(stage.recomputes for stage in self.stages if stage.recompute)
        return ", ".join(sorted(ways, reverse=True)) or "no"

    @property
    def workers(self) -> int:
        """The number of ranks that a run needs, one for each device."""
        return len(self.placement) * self.form.devices

    @property
    def degrees(self) -> dict[str, int | bool | str | None]:
        """The degrees of parallelism, by the names of the fields; `data` is None if stages differ."""
        form = self.form
        return {
            "tensor": form.tensor,
            "sequence_parallel": form.sequence_parallel,
            "pipeline": self.depth // self.chunks,
            "virtual_stages": self.chunks,
            "data": self.width,
            "context": form.context,
            "expert": form.expert,
            "expert_tensor": form.expert_tensor_degree,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a class of configurations is ruled out. `stage` and `missing_bytes` are those of its nearest miss."""

    rule: str
    detail: str
    configurations: int = 0
    stage: int | None = None
    missing_bytes: int | None = None

    __pydantic_config__: ClassVar = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No configuration fits: an answer, with the nearest miss first."""

    planner: str
    reasons: tuple[Reason, ...]
    configurations_considered: int

    __pydantic_config__: ClassVar = STRICT


Answer = Plan | Infeasible
