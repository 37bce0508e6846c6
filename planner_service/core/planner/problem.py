"""Problem: everything that a planner is told, and the type that all planners have."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from planner_service.core.cluster import Cluster
from planner_service.core.cost.calibration import Calibration, apply, require_match
from planner_service.core.errors import require, require_amount, require_count, require_unique
from planner_service.core.plan import OPTIMIZERS, SCHEDULES, Answer
from planner_service.core.planner.profiled import profiles_of_types, require_same_type, warning
from planner_service.core.profile import STRICT, Profile

SYNCHRONISATIONS = ("parameter-server", "all-reduce")
ACCOUNTINGS = ("training", "paper")
SEMANTICS = ("paper", "release")
CUTS = ("any", "single-tensor")

MOST_RECOMPUTATION = 1000
"""The largest c_extra. Far beyond it, sums of recomputed times round those that are not recomputed to 0."""


def _require_one_of(field: str, value: str | None, names: tuple[str, ...]) -> None:
    require(value is None or value in names, field, f"must be one of {', '.join(names)}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may fix. None leaves it to the planner; a planner refuses an option that it has no use for.

    `synchronisation`: PipeDream's gradient volume (2018, section 3.2: parameter server). `memory`: the accounting.
    `recompute_factor`: 2BW's c_extra where the recomputed forward is not to be taken from the profile.
    `safe_batch`: the batch size is the largest that is safe (2BW 2021, algorithm 1), not the one that must be.
    `master_weights`: whether gradients, and the optimizer's weights and states, are float32 (default: for 16 bits).
    `semantics`: PipeDream's objective as published, or as its authors' program computes it; `compression_ratio` is an
    option of that program. `straight`: one replica a stage. `fewer_machines`: some devices may stay idle.
    `cuts`: where a model that is a graph may be cut. `forced_cuts`, `forbidden_cuts`: a cut k stands before block k.
    `split_backward`: 2BP; `split_backward_half_way`: always as its memory-saving variant (2BP 2024, figure 5).
    `time_limit_s`: after which a solver returns the best that it has found.
    `as_if`: the profile may be of another type of device than the cluster, whose devices then count as the profile's.
    """

    microbatch_size: int | None = None
    schedule: str | None = None
    stages: int | None = None
    recompute: bool | None = None
    synchronisation: str | None = None
    memory: str = "training"
    optimizer: str = "sgd"
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

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for field in ("microbatch_size", "stages"):
            if getattr(self, field) is not None:
                require_count(field, getattr(self, field))
        _require_one_of("schedule", self.schedule, SCHEDULES)
        _require_one_of("synchronisation", self.synchronisation, SYNCHRONISATIONS)
        _require_one_of("memory", self.memory, ACCOUNTINGS)
        _require_one_of("optimizer", self.optimizer, OPTIMIZERS)
        _require_one_of("semantics", self.semantics, SEMANTICS)
        _require_one_of("cuts", self.cuts, CUTS)
        split = self.split_backward is not False or not self.split_backward_half_way
        rule = "is a variant of split_backward, which must not be off"
        require(split, "split_backward_half_way", rule, self.split_backward_half_way)
        for field in ("recompute_factor", "compression_ratio", "time_limit_s"):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model as profiled, the devices to train it on, and the samples of a batch.

    Where the cluster has devices of several types, `other_profiles` are the same model's on the other types: together
    one profile for each, matched by the device's name. A profile of another known type than the cluster's is refused
    unless `options.as_if`. Planners are asked the `corrected` problem.
    """

    profile: Profile
    cluster: Cluster
    batch_size: int
    options: Options = Options()
    other_profiles: tuple[Profile, ...] = ()
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        require_count("batch_size", self.batch_size)
        if self.calibration is not None:
            require_match(self.calibration, self.profile, self.cluster)
        if len(self.cluster.types) > 1:
            self._check_profiles()
            return
        named = [profile.device.name for profile in self._profiles]
        require(not self.other_profiles, "other_profiles", "is for a cluster with groups of devices", named)
        if not self.options.as_if:
            require_same_type(self.profile, self.cluster.device)

    def _check_profiles(self) -> None:
        if not self.options.as_if:
            named = [profile.device.name for profile in self._profiles]
            require_unique("other_profiles", "must not profile a type of device twice", named)
        profiles_of_types(self._profiles, self.cluster.types, as_if=self.options.as_if)
        for other in self.other_profiles:
            self._require_same_model(other)

    def _require_same_model(self, other: Profile) -> None:
        device, field = other.device.name, "other_profiles"
        rule = f"must be of the same {{}} on {device} as on {self.profile.device.name}"
        require(other.model == self.profile.model, field, rule.format("model"), other.model.name)
        require(other.dtype == self.profile.dtype, field, rule.format("dtype"), other.dtype)
        require(other.edges == self.profile.edges, field, rule.format("edges"), other.edges)
        blocks = len(other.blocks)
        require(len(self.profile.blocks) == blocks, field, rule.format("number of blocks"), blocks)
        for mine, block in zip(self.profile.blocks, other.blocks, strict=True):
            require(mine.name == block.name, field, rule.format("blocks"), block.name)
            same = mine.weight_bytes == block.weight_bytes
            require(same, field, rule.format(f"weight_bytes of block {block.name}"), block.weight_bytes)

    @property
    def corrected(self) -> "Problem":
        """The problem with the calibration applied, and none left to apply."""
        if self.calibration is None:
            return self
        profile, cluster = apply(self.calibration, self.profile, self.cluster)
        return replace(self, profile=profile, cluster=cluster, calibration=None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a plan says of profiles that may not be of the cluster's devices; as a rule nothing."""
        pairs = ((self.profile_on(device.name), device) for device in self.cluster.types)
        found = (warning(profile, device, as_if=self.options.as_if) for profile, device in pairs)
        return tuple(sentence for sentence in found if sentence is not None)

    def profile_on(self, device: str | None) -> Profile:
        """The profile of a type of the cluster's devices, by its name; the first where there is no name."""
        types = self.cluster.types
        if device is None or len(types) == 1:
            return self.profile
        of_types = profiles_of_types(self._profiles, types, as_if=self.options.as_if)
        return of_types[[each.name for each in types].index(device)]

    @property
    def _profiles(self) -> tuple[Profile, ...]:
        return (self.profile, *self.other_profiles)


Planner = Callable[[Problem], Answer]
"""Pure and deterministic: the same problem gives the same answer. Raises InvalidInputError for what cannot be asked."""
