"""Plans: requests, summaries for lists, the instruction streams in text form, comparisons and aliases.

A comparison puts plans side by side: what differs, and what makes each faster or slower than the first.
An alias is a name that points at a plan, for readers that do not know ids; its history is kept.
"""

import re
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from pipeplan.documents.calibration import Calibration
from pipeplan.documents.degrees import ANY_OFFLOAD, OFFLOADS
from pipeplan.documents.engines import ENGINES, SHARDINGS
from pipeplan.documents.plan import FIRST_VERSION, OPTIMIZERS, RECOMPUTE_UNITS, Alternative, Stage
from pipeplan.errors import require
from pipeplan.planners.problem import ACCOUNTINGS, CUTS, MAX_BATCH_SIZE, SEMANTICS, SYNCHRONISATIONS, Options
from pipeplan.protocol.documents import DEVICE_TYPES
from pipeplan.protocol.listing import ListQuery, Name, WireModel
from pipeplan.schedules.registry import schedule_names

MAX_CHARACTERS = 200
"""The longest name of an alias."""

PATTERN = r"^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*$"
"""The pattern of an alias's name."""

RESERVED = ("plan", "history")
"""Last parts of a name that would clash with routes of an alias."""

PLAYED = "of the plan's streams when they are played; null where they were not"
CLOSED_FORM = "what the planner's formulas give, and its search compared"
"""The meaning of a plan's two kinds of figures."""

CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": tuple(schedule_names()),
    "synchronisation": SYNCHRONISATIONS,
    "memory": ACCOUNTINGS,
    "optimizer": tuple(OPTIMIZERS),
    "semantics": SEMANTICS,
    "cuts": CUTS,
    "engine": tuple(ENGINES),
    "sharding": tuple(SHARDINGS),
    "offload": (*OFFLOADS, ANY_OFFLOAD),
    "recompute_unit": tuple(RECOMPUTE_UNITS),
}
"""The options that are one of a few names."""

_ID = re.compile(r"[0-9a-f]{32}")
_SHORT_ID = re.compile(r"[0-9a-f]{4,31}")


class PlanQuestion(WireModel):
    """The common part of all requests for a plan: the cluster, the planner, the batch."""

    cluster_id: str = Field(
        min_length=1, max_length=64, description="id of a stored cluster, or NAME:NODES of a known one: dgx-h100:4"
    )
    planner: str = Field(default="auto", min_length=1, max_length=64, examples=["pipedream-2bw"])
    batch_size: int = Field(ge=1, le=MAX_BATCH_SIZE, description="samples in a batch")
    options: Options = Options()
    calibration: Calibration | None = Field(
        default=None, description="corrects profile and cluster; `pipeplan calibrate` makes it from runs"
    )


class PlanRequest(PlanQuestion):
    """Asks a planner for the fastest plan that fits. The same request to the same version gives the same plan."""

    profile_id: str = Field(min_length=1, max_length=64, description="id of a stored profile")
    other_profile_ids: tuple[str, ...] = Field(
        default=(), max_length=16, description="the same model's profiles on the cluster's other types of devices"
    )


class PlanSummary(WireModel):
    """A stored plan: its shape and its predictions; `estimated` if its profile was not measured."""

    id: str
    planner: str
    model: str
    profile_id: str
    cluster_id: str
    schedule: str
    depth: int
    width: int | None
    workers: int
    batch_size: int
    microbatch_size: int
    microbatches: int
    throughput_samples_per_s: float | None = Field(description=PLAYED)
    bubble_fraction: float | None = Field(description=PLAYED)
    closed_form_samples_per_s: float = Field(description=CLOSED_FORM)
    closed_form_bubble_fraction: float = Field(description=CLOSED_FORM)
    solve_time_s: float
    created_at: datetime
    estimated: bool = False
    memory_bytes: int = Field(description="what a worker of the fullest stage holds at its peak")
    device: str = Field(description="the type of the cluster's first device")
    devices: int = Field(description="the cluster's devices")
    device_types: str = Field(description=DEVICE_TYPES)
    asked_by: str | None = Field(default=None, description="the name of the token that asked first, or `local`")
    planner_version: str = Field(default=FIRST_VERSION, description="which version of the planner made it")


class PlanQuery(ListQuery):
    """Which plans, and in which order: with a minus, descending. Default: newest first.

    `throughput` is the played one: plans whose streams were not played come last in both directions, and do not pass
    `min_throughput`.
    """

    sort: Literal["created_at", "-created_at", "throughput", "-throughput", "memory", "-memory"] | None = None
    planner: Name | None = None
    schedule: Name | None = None
    model: Name | None = Field(default=None, description="the model's name")
    device: Name | None = Field(default=None, description="a type of the cluster's devices")
    devices: int | None = Field(default=None, ge=1, le=2**31 - 1, description="the cluster's devices")
    profile_id: Name | None = None
    cluster_id: Name | None = None
    estimated: bool | None = Field(default=None, description="whether the profile was computed, not measured")
    min_throughput: float | None = Field(default=None, ge=0, description="samples/s of the played streams")
    content: bool = Field(default=False, description="whole plans instead of their summaries")


class StreamText(WireModel):
    """One worker's instructions, in the order it executes them: `F1 >F1:1 <B1:1 B1 U1`."""

    rank: int
    stage: int
    replica: int
    text: str


class Streams(WireModel):
    """The instruction streams of a plan's first batches, by rank."""

    plan_id: str
    schedule: str
    batches: int
    streams: tuple[StreamText, ...]


class PlanFacts(WireModel):
    """A plan's facts and predictions. `simulated_...` are the names of 0.1.0 for the played figures."""

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
    autocast: str | None = Field(default=None, description="what blocks with float32 weights compute in")
    precision: str | None = Field(default=None, description="what linear layers compute in, where not the dtype")
    optimizer: str
    memory_accounting: str
    estimated: bool
    synchronous: bool | None = Field(
        default=None, description="whether it trains as one process does; null where its schedule is not installed"
    )
    cuts: tuple[int, ...] = Field(description="the first block of every stage but the first")
    recomputing_stages: tuple[int, ...]
    throughput_samples_per_s: float | None = Field(description=PLAYED)
    simulated_samples_per_s: float | None = Field(description="the same as throughput_samples_per_s")
    closed_form_samples_per_s: float = Field(description=CLOSED_FORM)
    bubble_fraction: float | None = Field(description=PLAYED)
    simulated_bubble_fraction: float | None = Field(description="the same as bubble_fraction")
    closed_form_bubble_fraction: float = Field(description=CLOSED_FORM)
    slowest_stage: int = Field(description="the stage whose replicas together take longest for a sample")
    slowest_stage_time_s: float = Field(description="a microbatch's, as the planner has it")
    slowest_s_per_sample: float = Field(description="compute a sample of the rank with that stage, shared by replicas")
    exchange_s_per_sample: float = Field(description="its update, and with a flush the exchange that no backward hides")
    memory_bytes: int = Field(description="of a worker of the fullest stage")
    compute_s_per_sample: float = Field(description="forward, backward and recomputation on all stages together")
    device_s_per_sample: float = Field(description="the same, times the devices that share the blocks of a stage")
    busy_fraction: float = Field(
        description="the workers' share of time that this compute takes, by the played throughput; the closed form's "
        "where the streams were not played"
    )
    stages: tuple[Stage, ...]


class Difference(WireModel):
    """A fact that differs between the plans; the values are in the plans' order."""

    field: str
    values: tuple[Any, ...]


class Factor(WireModel):
    """One factor of a plan's speed, relative to the first plan's."""

    name: str
    ratio: float
    text: str


class Speed(WireModel):
    """A plan's speed relative to the first: the product of the factors is the ratio.

    The ratio is that of played throughputs, or of the closed forms' if one of the two plans was not played.
    """

    id: str
    ratio: float | None
    price: Literal["played", "closed form"]
    because: tuple[Factor, ...]


class Comparison(WireModel):
    """Plans side by side. The fastest is the fastest played one; if none was played, the fastest by closed form.

    `caveats`: sentences that say why the plans are not comparable, for example because of another model or batch.
    """

    plans: tuple[PlanFacts, ...]
    differences: tuple[Difference, ...]
    speeds: tuple[Speed, ...]
    fastest: str
    caveats: tuple[str, ...] = ()


class Alternatives(WireModel):
    """The alternatives to a plan, why each lost, and the plans that no other beats in both throughput and memory."""

    plan_id: str
    configurations_considered: int
    alternatives: tuple[Alternative, ...]
    pareto: tuple[Alternative, ...]


class AliasTarget(WireModel):
    """The plan at which an alias will point."""

    plan_id: str = Field(min_length=1, max_length=64, description="id of a stored plan")


class Alias(WireModel):
    """A name, and the plan that it points at. `version` changes with every move and is its entity tag."""

    name: str
    plan_id: str
    version: int
    moved_by: str = Field(description="the name of the token that moved it, or `local`")
    moved_at: datetime
    created_at: datetime


class AliasMove(WireModel):
    """An alias was set: to a plan, or to none when it was deleted."""

    version: int
    plan_id: str | None
    moved_by: str
    moved_at: datetime


class AliasQuery(ListQuery):
    """Which aliases, and in which order: a minus reverses it. Default: newest first."""

    sort: Literal["created_at", "-created_at", "name", "-name"] | None = None
    plan_id: Name | None = Field(default=None, description="those that point at this plan")


def require_name(name: str) -> None:
    """Raises InvalidInputError unless the name is valid for an alias, and cannot be taken for a plan's id."""
    require(0 < len(name) <= MAX_CHARACTERS, "name", f"must have 1 to {MAX_CHARACTERS} characters", name)
    rule = "must consist of a-z, 0-9, '.', '_' and '-', in parts that '/' separates and a letter or digit starts"
    require(re.fullmatch(PATTERN.strip("^$"), name) is not None, "name", rule, name)
    require(not is_plan_id(name), "name", "must not look like a plan's id", name)
    last = name.rpartition("/")[2]
    require("/" not in name or last not in RESERVED, "name", f"must not end with /{' or /'.join(RESERVED)}", name)


def is_plan_id(name: str) -> bool:
    """Whether the text is a plan's id, and not an alias's name."""
    return _ID.fullmatch(name) is not None


def is_short_id(name: str) -> bool:
    """Whether the text may be the prefix of an id."""
    return _SHORT_ID.fullmatch(name) is not None
