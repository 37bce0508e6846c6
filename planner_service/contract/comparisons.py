"""Comparisons: plans side by side, what differs, and what makes each faster or slower than the first."""

from typing import Any

from pydantic import Field

from pipeplan.documents.plan import Alternative, Stage
from planner_service.contract.wire import Wire


class PlanFacts(Wire):
    """What a plan is and promises. `simulated_...` is what its streams gave when they were played."""

    id: str
    planner: str
    model: str
    profile_id: str
    cluster_id: str
    schedule: str
    split_backward: bool
    depth: int
    replicas: tuple[int, ...]
    workers: int
    batch_size: int
    microbatch_size: int
    microbatches: int
    dtype: str
    optimizer: str
    memory_accounting: str
    estimated: bool
    cuts: tuple[int, ...] = Field(description="the first block of every stage but the first")
    recomputing_stages: tuple[int, ...]
    throughput_samples_per_s: float
    simulated_samples_per_s: float | None
    bubble_fraction: float
    simulated_bubble_fraction: float | None
    slowest_stage: int
    slowest_stage_time_s: float
    memory_bytes: int = Field(description="of a worker of the fullest stage")
    compute_s_per_sample: float = Field(description="forward, backward and recomputation on all stages together")
    busy_fraction: float = Field(description="the workers' share of time that this compute takes")
    stages: tuple[Stage, ...]


class Difference(Wire):
    """A fact that the plans do not share; the values are in the plans' order."""

    field: str
    values: tuple[Any, ...]


class Factor(Wire):
    """One reason for another speed: this times as fast as the first, because of it."""

    name: str
    ratio: float
    text: str


class Speed(Wire):
    """How a plan's speed comes about, against the first: the factors' product is the ratio."""

    id: str
    ratio: float | None
    because: tuple[Factor, ...]


class Comparison(Wire):
    """Plans side by side."""

    plans: tuple[PlanFacts, ...]
    differences: tuple[Difference, ...]
    speeds: tuple[Speed, ...]
    fastest: str


class Alternatives(Wire):
    """What a plan was chosen over, why, and which plans no other beats in both throughput and memory."""

    plan_id: str
    configurations_considered: int
    alternatives: tuple[Alternative, ...]
    pareto: tuple[Alternative, ...]
