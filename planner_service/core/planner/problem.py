"""Problem: everything that a planner is told, and the type that all planners have."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from planner_service.core.cluster import Cluster
from planner_service.core.errors import require, require_amount, require_count
from planner_service.core.plan import OPTIMIZERS, SCHEDULES, Answer
from planner_service.core.profile import STRICT, Profile

SYNCHRONISATIONS = ("parameter-server", "all-reduce")
ACCOUNTINGS = ("training", "paper")


def _require_one_of(field: str, value: str | None, names: tuple[str, ...]) -> None:
    require(value is None or value in names, field, f"must be one of {', '.join(names)}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may fix. None leaves it to the planner; a planner refuses an option that it has no use for.

    `synchronisation`: PipeDream's gradient volume (2018, section 3.2: parameter server). `memory`: the accounting.
    `recompute_factor`: 2BW's c_extra where the recomputed forward is not to be taken from the profile.
    """

    microbatch_size: int | None = None
    schedule: str | None = None
    stages: int | None = None
    recompute: bool | None = None
    synchronisation: str | None = None
    memory: str = "training"
    optimizer: str = "sgd"
    recompute_factor: float | None = None

    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        for field in ("microbatch_size", "stages"):
            if getattr(self, field) is not None:
                require_count(field, getattr(self, field))
        _require_one_of("schedule", self.schedule, SCHEDULES)
        _require_one_of("synchronisation", self.synchronisation, SYNCHRONISATIONS)
        _require_one_of("memory", self.memory, ACCOUNTINGS)
        _require_one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.recompute_factor is not None:
            require_amount("recompute_factor", self.recompute_factor, positive=True)


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
