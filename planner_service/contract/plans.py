"""Plans: what is asked for, what lists show, and the instruction streams in their text form."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from pipeplan.documents.calibration import Calibration
from pipeplan.documents.plan import FIRST_VERSION
from pipeplan.planners.problem import Options
from planner_service.contract.listing import ListQuery, Name
from planner_service.contract.wire import Wire

MAX_BATCH_SIZE = 2**31 - 1


class PlanRequest(Wire):
    """Asks a planner for the fastest plan that fits. The same request to the same version gives the same plan."""

    profile_id: str = Field(min_length=1, max_length=64, description="id of a stored profile")
    cluster_id: str = Field(min_length=1, max_length=64, description="id of a stored cluster")
    planner: str = Field(min_length=1, max_length=64, examples=["pipedream-2bw"])
    batch_size: int = Field(ge=1, le=MAX_BATCH_SIZE, description="samples in a batch")
    options: Options = Options()
    other_profile_ids: tuple[str, ...] = Field(
        default=(), max_length=16, description="the same model's profiles on the cluster's other types of devices"
    )
    calibration: Calibration | None = Field(
        default=None, description="corrects profile and cluster; `pipeplan calibrate` makes it from runs"
    )


class PlanSummary(Wire):
    """A stored plan: its shape and the predicted throughput; `estimated` if its profile was not measured."""

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
    throughput_samples_per_s: float
    bubble_fraction: float
    solve_time_s: float
    created_at: datetime
    estimated: bool = False
    memory_bytes: int = Field(description="what a worker of the fullest stage holds at its peak")
    device: str = Field(description="the type of the cluster's devices")
    devices: int = Field(description="the cluster's devices")
    asked_by: str | None = Field(default=None, description="the name of the token that asked first, or `local`")
    planner_version: str = Field(default=FIRST_VERSION, description="which version of the planner made it")


class PlanQuery(ListQuery):
    """Which plans, and in which order: a minus before it is from the most to the least. Default: newest first."""

    sort: Literal["created_at", "-created_at", "throughput", "-throughput", "memory", "-memory"] | None = None
    planner: Name | None = None
    schedule: Name | None = None
    model: Name | None = Field(default=None, description="the model's name")
    device: Name | None = Field(default=None, description="the type of the cluster's devices")
    devices: int | None = Field(default=None, ge=1, le=2**31 - 1, description="the cluster's devices")
    profile_id: Name | None = None
    cluster_id: Name | None = None
    estimated: bool | None = Field(default=None, description="whether the profile was computed, not measured")
    min_throughput: float | None = Field(default=None, ge=0, description="samples/s, predicted")
    content: bool = Field(default=False, description="whole plans instead of their summaries")


class StreamText(Wire):
    """One worker's instructions, in the order it executes them: `F1 >F1:1 <B1:1 B1 U1`."""

    rank: int
    stage: int
    replica: int
    text: str


class Streams(Wire):
    """The instruction streams of a plan's first batches, by rank."""

    plan_id: str
    schedule: str
    batches: int
    streams: tuple[StreamText, ...]
