"""Jobs: what the service asks of agents, and what they report back under a lease."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from planner_service.contract.plans import PlanRequest
from planner_service.contract.wire import Wire
from planner_service.core.cluster import Cluster
from planner_service.core.plan import Infeasible
from planner_service.core.profile import Profile
from planner_service.core.report import RunReport
from planner_service.core.timeline import Timeline


class ProfileTask(Wire):
    """Profile a model on this node, all its devices at once, and measure the links between them."""

    kind: Literal["profile"] = "profile"
    model: str = Field(min_length=1, max_length=2000, description="SPEC of the model", examples=["hf:gpt2?n_layer=4"])
    data: str | None = Field(default=None, max_length=2000, description="SPEC of the data; default: random inputs")
    microbatch_sizes: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = Field(min_length=1, max_length=64)
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = "sgd"
    devices: int = Field(default=1, ge=1, le=64, description="devices of the node to measure on, and to register")
    warm_up_rounds: int = Field(default=2, ge=0, le=1000)
    rounds: int = Field(default=5, ge=1, le=10000)


class RunTask(Wire):
    """Execute a plan on this node through torchrun."""

    kind: Literal["run"] = "run"
    plan_id: str = Field(min_length=1, max_length=64)
    model: str = Field(min_length=1, max_length=2000)
    data: str = Field(min_length=1, max_length=2000)
    loss: str | None = Field(default=None, max_length=2000)
    steps: int = Field(ge=1, le=10_000_000)
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    learning_rate: float = Field(default=0.1, gt=0, le=1000)
    checkpoint_every: int = Field(default=0, ge=0)


class PlanTask(Wire):
    """Ask a planner. The service's own solver processes do it; agents are never given one."""

    kind: Literal["plan"] = "plan"
    request: PlanRequest


Task = Annotated[ProfileTask | RunTask | PlanTask, Field(discriminator="kind")]

JobState = Literal["queued", "leased", "succeeded", "failed", "cancelled"]


class Progress(Wire):
    """How far a job is: `done` of `total` units, and what it is at in a few words."""

    done: int = Field(ge=0)
    total: int = Field(ge=0)
    message: str = Field(default="", max_length=500)


class Job(Wire):
    """A job as everybody sees it. A run has its id from the start; other ids are there once the job has succeeded.

    A plan job that found that no plan fits has succeeded too: with `infeasible`, the reasons, instead of a plan's id.
    """

    id: str
    task: Task
    state: JobState
    attempts: int
    agent: str | None = None
    lease_expires_at: datetime | None = None
    progress: Progress | None = None
    error: str | None = None
    profile_id: str | None = None
    cluster_id: str | None = None
    run_id: str | None = None
    plan_id: str | None = None
    infeasible: Infeasible | None = None
    solve_time_s: float | None = None
    created_at: datetime
    updated_at: datetime


class LeaseRequest(Wire):
    """An agent asks for work. `kinds` are those that it can do."""

    agent: str = Field(min_length=1, max_length=200)
    kinds: tuple[Literal["profile", "run"], ...] = ("profile", "run")


class Lease(Wire):
    """A job and the token under which its owner reports. The lease ends unless a heartbeat comes in time."""

    job: Job
    token: str
    expires_in_s: float


class Heartbeat(Wire):
    """The owner is alive; the answer says whether it should go on."""

    token: str
    progress: Progress | None = None


class HeartbeatAnswer(Wire):
    """`cancelled` asks the owner to stop."""

    expires_in_s: float
    cancelled: bool


class ProfileResult(Wire):
    """What a profile job gives: stored, with the job's end, in one transaction."""

    kind: Literal["profile"] = "profile"
    profile: Profile
    cluster: Cluster


class RunResult(Wire):
    """What a run job gives."""

    kind: Literal["run"] = "run"
    report: RunReport
    timeline: Timeline


class Completion(Wire):
    """The owner's last word on a job that went well."""

    token: str
    result: Annotated[ProfileResult | RunResult, Field(discriminator="kind")]


class Failure(Wire):
    """The owner's last word on a job that did not; `error` is one sentence for the user."""

    token: str
    error: str = Field(min_length=1, max_length=4000)
