"""Problem: everything that a planner is told, and the type that all planners have."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from planner_service.core.cluster import Cluster
from planner_service.core.errors import require, require_amount, require_count, require_unique
from planner_service.core.plan import OPTIMIZERS, SCHEDULES, Answer
from planner_service.core.profile import STRICT, Profile

SYNCHRONISATIONS = ("parameter-server", "all-reduce")
ACCOUNTINGS = ("training", "paper")
SEMANTICS = ("paper", "release")
CUTS = ("any", "single-tensor")


def _require_one_of(field: str, value: str | None, names: tuple[str, ...]) -> None:
    require(value is None or value in names, field, f"must be one of {', '.join(names)}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may fix. None leaves it to the planner; a planner refuses an option that it has no use for.

    `synchronisation`: PipeDream's gradient volume (2018, section 3.2: parameter server). `memory`: the accounting.
    `recompute_factor`: 2BW's c_extra where the recomputed forward is not to be taken from the profile.
    `safe_batch`: the batch size is the largest that is safe (2BW 2021, algorithm 1), not the one that must be.
    `master_weights`: whether an optimizer keeps weights and states in float32 (default: for 16-bit weights).
    `semantics`: PipeDream's objective as published, or as its authors' program computes it; `compression_ratio` is an
    option of that program. `straight`: one replica a stage. `fewer_machines`: some devices may stay idle.
    `cuts`: where a model that is a graph may be cut. `forced_cuts`, `forbidden_cuts`: a cut k stands before block k.
    `split_backward`: 2BP. `time_limit_s`: after which a solver returns the best that it has found.
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
    time_limit_s: float | None = None

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
        for field in ("recompute_factor", "compression_ratio", "time_limit_s"):
            if getattr(self, field) is not None:
                require_amount(field, getattr(self, field), positive=True)
        for field in ("forced_cuts", "forbidden_cuts"):
            for cut in getattr(self, field):
                require_count(field, cut)
            require_unique(field, "must not name a cut twice", getattr(self, field))
        both = sorted(set(self.forced_cuts) & set(self.forbidden_cuts))
        require(not both, "forced_cuts", "must not be forbidden as well", both)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model as profiled, the devices to train it on, and the samples of a batch."""

    profile: Profile
    cluster: Cluster
    batch_size: int
    options: Options = Options()

    def __post_init__(self) -> None:
        require_count("batch_size", self.batch_size)


Planner = Callable[[Problem], Answer]
"""Pure and deterministic: the same problem gives the same answer. Raises InvalidInputError for what cannot be asked."""
