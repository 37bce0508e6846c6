"""Problem: the input of a planner, and the type `Planner` that all planners have.

It also matches profiles to the types of a cluster's devices, checks options for all planners, and defines the progress
that a solver reports.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from pipeplan.documents.calibration import Calibration, apply, require_match
from pipeplan.documents.certificate import Certificate
from pipeplan.documents.cluster import Cluster, differ, is_same, is_unknown
from pipeplan.documents.degrees import ANY_OFFLOAD, OFFLOADS
from pipeplan.documents.engines import ENGINES, OUR_RUNTIME, SHARDINGS, engine_named
from pipeplan.documents.measurement import Measurement
from pipeplan.documents.names import STRICT
from pipeplan.documents.plan import OPTIMIZERS, RECOMPUTE_UNITS, Answer
from pipeplan.documents.profile import Device, Profile
from pipeplan.errors import LEAST_AMOUNT, require, require_amount, require_count, require_one_of, require_unique, shown
from pipeplan.programs.schedule import UPDATES_LATE, Schedule
from pipeplan.schedules.registry import schedule_named

SYNCHRONISATIONS = ("parameter-server", "all-reduce")
ACCOUNTINGS = ("training", "paper")
SEMANTICS = ("played", "paper", "release")
CUTS = ("any", "single-tensor")

MOST_RECOMPUTATION = 1000
"""The largest c_extra. With far larger ones, sums of recomputed times round the times of other stages to 0."""

PRICED_THROUGH_SERVERS = (
    "gradients are exchanged through a parameter server in this price, as asked (synchronisation): "
    "the runtime exchanges them by an all-reduce"
)
"""The warning of plans whose exchange is not the one that runs."""

ALWAYS_USED = ("memory", "optimizer", "master_weights", "as_if", "semantics", "synchronous")
"""Options that every planner uses."""

MAX_BLOCKS, MAX_BATCH_SIZE = 10_000, 2**31 - 1
"""Tables of stages grow with the blocks, as does the time of every split; a service's database holds such samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may fix. None leaves it to the planner; a planner refuses an option that it does not use.

    - `stages`: the ranks of a pipeline; `chunks`: the stages that each of them holds, in an interleaved schedule.
    - `recompute_unit`: the unit of recomputation (None: the stage if that fits, else the unit that holds less).
    - `recompute_factor`: 2BW's c_extra, at least 1, where the recomputed forward is not to be taken from the profile.
    - `synchronisation`: how PipeDream's replicas exchange gradients, in its closed form and in the play: by the
      all-reduce that runs (default), or by the paper's parameter server (2018, section 3.2).
    - `memory`: the accounting.
    - `optimizer`: what updates the weights (None: what the engine's users train with, `optimizer_or_default`).
    - `master_weights`: whether gradients, and the optimizer's weights and states, are float32 (default: for 16 bits).
    - `safe_batch`: the batch size is an upper bound (2BW 2021, algorithm 1), not a requirement.
    - `semantics`: how plans are compared: by the play of their streams (default), by the paper's closed form, or as
      PipeDream's authors' program does (`release`); `compression_ratio` is an option of that program.
    - `straight`: one replica a stage. `fewer_machines`: some devices may stay idle.
    - `cuts`: where a model that is a graph may be cut: anywhere (the default), or where one tensor crosses.
    - `forced_cuts`, `forbidden_cuts`: a cut k stands before block k; of a graph, in the order of `on_chain`.
    - `split_backward`: 2BP; `split_backward_half_way`: always as its memory-saving variant (2BP 2024, figure 5).
    - `time_limit_s`: when a solver returns the best that it has found.
    - `as_if`: the profile may be of another type of device than the cluster, whose devices then count as the profile's.
    - `synchronous`: only plans that train as one process does: no gradient is late (`Schedule.updates_late`).
    - `engine`: what runs the plan, by default our runtime (`documents.engines`). For the engines that support them:
      `tensor`, `context`, `expert`, `expert_tensor`, `data` are degrees, `sharding` says which states replicas share,
      `replicate` in how many groups, `graphs` whether CUDA graphs are launched, `a2a_overlap` whether experts'
      exchanges overlap other microbatches, `offload` what is in the host's memory, and `offload_share` of which layers.
    """

    microbatch_size: int | None = None
    schedule: str | None = None
    stages: int | None = None
    chunks: int | None = None
    recompute: bool | None = None
    recompute_unit: str | None = None
    synchronisation: str | None = None
    memory: str = "training"
    optimizer: str | None = None
    recompute_factor: float | None = None
    safe_batch: bool = False
    master_weights: bool | None = None
    semantics: str | None = None
    compression_ratio: float | None = None
    straight: bool = False
    fewer_machines: bool = False
    cuts: str | None = None
    forced_cuts: tuple[int, ...] = ()
    forbidden_cuts: tuple[int, ...] = ()
    split_backward: bool | None = None
    split_backward_half_way: bool = False
    time_limit_s: float | None = None
    as_if: bool = False
    engine: str | None = None
    tensor: int | None = None
    sequence_parallel: bool | None = None
    context: int | None = None
    expert: int | None = None
    data: int | None = None
    sharding: str | None = None
    offload: str | None = None
    synchronous: bool = False
    expert_tensor: int | None = None
    replicate: int | None = None
    graphs: bool | None = None
    a2a_overlap: bool = False
    offload_share: float | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        degrees = ("tensor", "context", "expert", "expert_tensor", "data", "replicate")
        for field in ("microbatch_size", "stages", "chunks", *degrees):
            if getattr(self, field) is not None:
                require_count(field, getattr(self, field))
        if self.schedule is not None:
            laws, rule = schedule_named(self.schedule), f"must be off for the schedule {self.schedule}, {UPDATES_LATE}"
            require(not self.synchronous or laws.synchronous, "synchronous", rule, True)
        for field, names in (
            ("synchronisation", SYNCHRONISATIONS),
            ("memory", ACCOUNTINGS),
            ("optimizer", OPTIMIZERS),
            ("semantics", SEMANTICS),
            ("cuts", CUTS),
            ("engine", tuple(ENGINES)),
            ("sharding", SHARDINGS),
            ("offload", (*OFFLOADS, ANY_OFFLOAD)),
            ("recompute_unit", RECOMPUTE_UNITS),
        ):
            if getattr(self, field) is not None:
                require_one_of(names, field, getattr(self, field))
        split = self.split_backward is not False or not self.split_backward_half_way
        rule = "is a variant of split_backward, which must not be off"
        require(split, "split_backward_half_way", rule, self.split_backward_half_way)
        self._require_unit()
        for field in ("recompute_factor", "compression_ratio", "time_limit_s", "offload_share"):
            if getattr(self, field) is not None:
                require_amount(field, getattr(self, field), positive=True)
        few = (self.recompute_factor or 0.0) <= MOST_RECOMPUTATION
        require(few, "recompute_factor", f"must be at most {MOST_RECOMPUTATION}", self.recompute_factor)
        for field in ("forced_cuts", "forbidden_cuts"):
            for cut in getattr(self, field):
                require_count(field, cut)
            require_unique(field, "must not name a cut twice", getattr(self, field))
        both = sorted(set(self.forced_cuts) & set(self.forbidden_cuts))
        require(not both, "forced_cuts", "must not be forbidden as well", both)

    @property
    def optimizer_or_default(self) -> str:
        """The requested optimizer; by default that of the engine."""
        return self.optimizer or ENGINES[self.engine or OUR_RUNTIME].optimizer

    def require_possible(self) -> None:
        """Raises InvalidInputError for values that no plan can have, though requests stored earlier may hold them.

        A stage with recomputation takes at least as long as without.
        """
        factor = self.recompute_factor
        rule = "must be at least 1, because recomputation only adds work"
        require(factor is None or factor >= 1, "recompute_factor", rule, factor)

    def _require_unit(self) -> None:
        """Raises InvalidInputError for a unit of recomputation that the other options make ineffective."""
        unit = self.recompute_unit
        require(
            unit is None or self.recompute is not False, "recompute_unit", "is of recomputation, which is off", unit
        )
        if unit in (None, RECOMPUTE_UNITS[0]):
            return
        require(
            self.memory != "paper", "recompute_unit", "must be stage with memory paper: the papers have no other", unit
        )
        splits = self.schedule is not None and schedule_named(self.schedule).splits_backward
        rule = "must be stage where the backward is split: by block it is done as a whole"
        require(not splits and not self.split_backward, "recompute_unit", rule, unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """A model as profiled, the devices to train it on, and the samples of a batch.

    Where the cluster has devices of several types, `other_profiles` are the same model's on the other types: together
    one profile for each, matched by the device's name. A profile of another known type than the cluster's is refused
    unless `options.as_if`. Planners get the `corrected` problem. `graph` is set where the profile is a chain made of a
    graph (`on_chain`).
    """

    profile: Profile
    cluster: Cluster
    batch_size: int
    options: Options = Options()
    other_profiles: tuple[Profile, ...] = ()
    calibration: Calibration | None = None
    graph: "CutGraph | None" = None

    def __post_init__(self) -> None:
        require_batch_size(self.batch_size)
        self.options.require_possible()
        engine = engine_named(self.options.engine or OUR_RUNTIME)
        engine.require_precision(self.profile.precision, "profile.precision")
        ours = engine.name == OUR_RUNTIME
        rule = f"must be left out for the engine {engine.name}, which has no autocast: profile in 16 bits"
        require(ours or self.profile.autocast is None, "profile.autocast", rule, self.profile.autocast)
        if self.calibration is not None:
            require_match(self.calibration, self.profile, self.cluster)
        as_if = self.options.as_if
        named = [profile.device.name for profile in self._profiles]
        if len(self.cluster.types) == 1:
            require(not self.other_profiles, "other_profiles", "is for a cluster with groups of devices", named)
            if not as_if:
                require_same_type(self.profile, self.cluster.device)
            return
        if not as_if:
            require_unique("other_profiles", "must not profile a type of device twice", named)
        profiles_of_types(self._profiles, self.cluster.types, as_if=as_if)
        mine, field = self.profile, "other_profiles"
        for other in self.other_profiles:
            rule = f"must be of the same {{}} on {other.device.name} as on {mine.device.name}"
            require(other.model == mine.model, field, rule.format("model"), other.model.name)
            for what in ("dtype", "autocast", "precision", "edges"):
                require(getattr(other, what) == getattr(mine, what), field, rule.format(what), getattr(other, what))
            blocks = len(other.blocks)
            require(len(mine.blocks) == blocks, field, rule.format("number of blocks"), blocks)
            for own, block in zip(mine.blocks, other.blocks, strict=True):
                require(own.name == block.name, field, rule.format("blocks"), block.name)
                for counted in ("weight_bytes", "frozen_bytes", "buffer_bytes"):
                    here, there = getattr(own, counted), getattr(block, counted)
                    require(here == there, field, rule.format(f"{counted} of block {block.name}"), there)

    @property
    def corrected(self) -> "PlanningProblem":
        """The problem with the calibration applied and removed."""
        if self.calibration is None:
            return self
        profile, cluster = apply(self.calibration, self.profile, self.cluster)
        return replace(self, profile=profile, cluster=cluster, calibration=None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A plan's warnings, usually none: the profile may be of another device, or the exchange is not the one run."""
        pairs = ((self.profile_on(device.name), device) for device in self.cluster.types)
        found = [warning(profile, device, as_if=self.options.as_if) for profile, device in pairs]
        found += [PRICED_THROUGH_SERVERS] if self.options.synchronisation == "parameter-server" else []
        return tuple(sentence for sentence in found if sentence is not None)

    def profile_on(self, device: str | None) -> Profile:
        """The profile of a type of the cluster's devices, by its name; the first if there is no name."""
        types = self.cluster.types
        if device is None or len(types) == 1:
            return self.profile
        of_types = profiles_of_types(self._profiles, types, as_if=self.options.as_if)
        return of_types[[each.name for each in types].index(device)]

    @property
    def _profiles(self) -> tuple[Profile, ...]:
        return (self.profile, *self.other_profiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGraph:
    """The graph for which a problem of a chain stands.

    `order` has the graph's blocks. Block k of the chain has those from place `places[k]` to `places[k + 1]` of it.
    """

    problem: PlanningProblem
    order: Sequence[int]
    places: Sequence[int]

    def among_places(self, certificate: Certificate) -> Certificate:
        """The certificate for plans of the chain, with a note that it covers only these."""
        claim = f"{certificate.claim} Stages end at places of one order of the graph, not at any of its cuts."
        return replace(certificate, method=f"{certificate.method} on one order of the graph", claim=claim)


Planner = Callable[[PlanningProblem], Answer]
"""Pure and deterministic: the same problem gives the same answer. Raises InvalidInputError for unsupported problems."""


def require_batch_size(samples: int) -> None:
    """Raises InvalidInputError for a batch that is no whole number of samples, or larger than `MAX_BATCH_SIZE`."""
    require_count("batch_size", samples)
    require(samples <= MAX_BATCH_SIZE, "batch_size", f"must be at most {MAX_BATCH_SIZE} samples", samples)


def profiles_of_types(profiles: Sequence[Profile], types: Sequence[Device], *, as_if: bool) -> tuple[Profile, ...]:
    """A profile for each of several types, in the types' order, matched by name.

    A single profile that does not name its device takes the remaining type. With `as_if` all remaining profiles take
    the remaining types, in order. Raises InvalidInputError where this does not give a profile for each type.
    """
    named = [profile.device.name for profile in profiles]
    found: dict[str, int] = {}
    equal: Callable[[str, str], bool] = str.__eq__
    for matches in (equal, is_same):  # equal names first, then other spellings
        for device in types:
            free = (index for index in range(len(named)) if index not in found.values())
            place = next((index for index in free if matches(named[index], device.name)), None)
            if device.name not in found and place is not None:
                found[device.name] = place

    left = [index for index in range(len(profiles)) if index not in found.values()]
    missing = [device.name for device in types if device.name not in found]
    takes = as_if or not left or (len(left) == 1 and is_unknown(named[left[0]]))
    rule = f"must be one profile for each type of device, {', '.join(device.name for device in types)}"
    require(takes and len(left) == len(missing), "other_profiles", rule, named)
    found.update(zip(missing, left, strict=True))
    return tuple(profiles[found[device.name]] for device in types)


def require_same_type(profile: Profile, device: Device) -> None:
    """Raises InvalidInputError where profile and device are surely of two types."""
    profiled, present = profile.device.name, device.name
    rule = (
        f"must be the cluster's type of device, {shown(present)}: profile the model on such a device, or plan as if "
        "it were one (--as-if, options.as_if)"
    )
    require(not differ(profiled, present), "profile.device.name", rule, profiled)


def warning(profile: Profile, device: Device, *, as_if: bool) -> str | None:
    """A plan's warning if a profile may not be of the device that it is planned for; None if it is."""
    if is_same(profile.device.name, device.name) or (is_unknown(profile.device.name) and is_unknown(device.name)):
        return None
    profiled, present = shown(profile.device.name), shown(device.name)
    if is_unknown(profile.device.name):
        return (
            f"the profile does not name its device: its figures are taken as those of the cluster's device, {present}"
        )
    if is_unknown(device.name):
        return f"the cluster does not name its device: it is taken to be the profile's, {profiled}"
    if as_if:
        return (
            f"planned as if {present} were {profiled}: the figures are of {profiled}, the profile's device; "
            "only links and memory limits are the cluster's"
        )
    return (
        f"the profile is of {profiled}, the cluster of {present}: the figures are of {profiled}, "
        "and valid only if both names mean the same type"
    )


def refuse_unused(planner: str, options: Options, used: tuple[str, ...]) -> None:
    """Raises InvalidInputError for an option that is set and that the planner does not use."""
    for option in fields(options):
        value = getattr(options, option.name)
        fine = value == option.default or option.name in (*used, *ALWAYS_USED)
        require(fine, option.name, f"is not an option of the planner {planner}", value)


def require_schedule(options: Options, allowed: tuple[str, ...], planner: str) -> None:
    """Raises InvalidInputError if the requested schedule is not one of the planner's."""
    rule = f"must be one of {', '.join(allowed)} for the planner {planner}"
    require(options.schedule is None or options.schedule in allowed, "schedule", rule, options.schedule)


def recompute_units(problem: PlanningProblem, laws: Schedule) -> tuple[str, ...]:
    """The units by which a stage may recompute, the preferred ones first.

    The forward of a whole stage runs again while the gradient is on its way; a block's cannot, except for the last
    block. So the whole stage comes first. It is the only unit of the papers' accounting, of a split backward, and
    of a graph, whose blocks are known in one order alone. Raises InvalidInputError for another unit of a graph.
    """
    options, asked = problem.options, problem.options.recompute_unit
    whole = RECOMPUTE_UNITS[:1]
    rule = "must be stage for a model that is a graph"
    require(problem.graph is None or asked in (None, *whole), "recompute_unit", rule, asked)
    if problem.graph is not None or options.memory == "paper" or laws.splits_backward or options.split_backward:
        return whole
    return ENGINES[OUR_RUNTIME].recomputes if asked is None else (asked,)


def require_stages(problem: PlanningProblem) -> None:
    """Raises InvalidInputError for more stages than blocks or devices."""
    stages = problem.options.stages
    if stages is not None:
        blocks, devices = len(problem.profile.blocks), problem.cluster.devices
        require(stages <= blocks, "stages", f"must not exceed the number of blocks ({blocks})", stages)
        require(stages <= devices, "stages", f"must not exceed the number of devices ({devices})", stages)


def require_few_blocks(problem: PlanningProblem) -> None:
    """Raises InvalidInputError for more blocks than a search can split in a few seconds."""
    blocks = len(problem.profile.blocks)
    require(blocks <= MAX_BLOCKS, "profile.blocks", f"must be at most {MAX_BLOCKS} for this planner", blocks)


def measured_at(problem: PlanningProblem, microbatch_size: int) -> tuple[Measurement, ...]:
    """The blocks at this size. Raises InvalidInputError if they take no time, or the size was not measured."""
    sizes = problem.profile.microbatch_sizes
    rule = f"must be one of the measured sizes {list(sizes)}"
    require(microbatch_size in sizes, "microbatch_size", rule, microbatch_size)
    blocks = problem.profile.at(microbatch_size)
    total_s = sum(block.compute_s for block in blocks)
    require(total_s >= LEAST_AMOUNT, "profile.blocks", "must take some time together, forward and backward", total_s)
    return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """A search's progress: the best plan's seconds a sample, the lower bound on all plans', and the open shapes.

    `best_s` is None before a plan is found. `spent` and `limit` are deterministic seconds.
    """

    best_s: float | None
    bound_s: float
    open_shapes: int
    spent: float
    limit: float


Observer = Callable[[SearchProgress], None]
"""Receives a solver's progress. It cannot change what the solver finds."""


def unobserved(_: SearchProgress) -> None:
    """An observer that ignores all reports."""
