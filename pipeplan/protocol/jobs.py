"""Jobs: what the service asks of agents, and what they report back under a lease.

A task names factories by SPECs, and an agent's operator lists those that jobs may name. Both sides use the same check:
the service when it chooses an agent for a job, the agent before it runs one.

Tasks and completions are documents of several kinds; their errors name the field as the sender wrote it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from datetime import datetime
from typing import Annotated, Literal, cast
from urllib.parse import unquote

from pydantic import Field

from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse_sent
from pipeplan.documents.names import MAX_LENGTH, parse_spec, require_line
from pipeplan.documents.plan import Infeasible
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, require
from pipeplan.programs.timeline_document import TimelineDocument
from pipeplan.protocol.estimates import Dtype, EstimateResult, EstimateTask, SequenceLength
from pipeplan.protocol.listing import ListQuery, Name, WireModel
from pipeplan.protocol.plans import PlanRequest
from pipeplan.protocol.training import DESCRIBED_RATES, TrainingOptions
from pipeplan.simulation.report import RunReport

RULE = "must be a factory that this agent's operator allows (pipeplan-agent start --allow; --models-dir for paths)"

IN_FOLDER = "/**"
"""The ending of a pattern that allows all paths in a folder; no pattern of an operator has it."""

FIELDS = ("model", "data", "loss")
"""The fields of tasks that hold SPECs."""

KINDS = ("profile", "estimate", "links", "run", "plan", "part")
"""The kinds of tasks and of results."""

NO_NULL = r"^[^\x00]*$"
"""PostgreSQL keeps no text with a null character."""


def specs_of(task: object) -> Iterator[tuple[str, str]]:
    """The task's SPECs by field."""
    for field in FIELDS:
        spec = getattr(task, field, None)
        if spec is not None:
            yield field, spec


def require_specs(task: object) -> None:
    """Raises InvalidInputError for a task with a text that is not a SPEC, or data or a loss that is not a callable."""
    for field, text in specs_of(task):
        spec = parse_spec(text, field=field)
        rule = "must name a callable as preset:NAME or package.module:factory"
        require(field == "model" or not spec.is_hugging_face, field, rule, text)


def require_patterns(field: str, patterns: Iterable[str]) -> None:
    """Raises InvalidInputError for an operator's list with a text that no SPEC could match."""
    for pattern in patterns:
        require_line(field, pattern)
        rule = "must hold SPECs without options and spaces, a * at the end only"
        fits = pattern.strip() and not set(pattern.removesuffix("*")) & set("*?") and " " not in pattern
        require(bool(fits) and len(pattern) <= MAX_LENGTH, field, rule, pattern)
        if not pattern.endswith("*"):
            parse_spec(pattern, field=field)


def factory_of(text: str) -> str:
    """The name in a SPEC, without options and escapes; for a text that is not a SPEC, as in old jobs, its start."""
    try:
        return parse_spec(text, field="model").target
    except InvalidInputError:
        return text.partition("?")[0]


def allows(patterns: Iterable[str], factory: str) -> bool:
    return any(_covers(unquote(pattern), factory) for pattern in patterns)


def refusal(task: object, patterns: Iterable[str]) -> InvalidInputError | None:
    """Why a list does not allow a task; None if it does."""
    known = tuple(patterns)
    for field, spec in specs_of(task):
        try:
            target = parse_spec(spec, field=field).target
        except InvalidInputError as error:  # a job from before the grammar was checked
            return error
        if not allows(known, target):
            return InvalidInputError(field, RULE, spec)
    return None


def _covers(pattern: str, factory: str) -> bool:
    """Whether a pattern allows a factory. A trailing * reaches no further than a module's own names.

    `mine.models:*` must not allow `mine.models:os.system`, which the module holds if it imports os; nor does `hf:*`
    allow a path. `hf:FOLDER/**`, which an agent's `models_dir` adds, allows every path in a folder.
    """
    if pattern.endswith(IN_FOLDER):
        return factory.startswith(pattern.removesuffix("**")) and ".." not in factory.split("/")
    if not pattern.endswith("*"):
        return factory == pattern
    prefix = pattern[:-1]
    rest = factory.removeprefix(prefix)
    return factory.startswith(prefix) and not set("./") & set(rest.rpartition(":")[2])


AgentName = Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NULL)]
Instance = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{8,64}$", description="names an agent's process")]
Agents = Annotated[
    tuple[AgentName, ...], Field(max_length=1024, description="only agents of these names may take it; none: any agent")
]
"""Which agents a task may go to."""


class ProfileTask(WireModel):
    """Profile a model on this node, all its devices at once, and measure the links between them."""

    kind: Literal["profile"] = "profile"
    model: str = Field(min_length=1, max_length=2000, description="SPEC of the model", examples=["hf:gpt2?n_layer=4"])
    data: str | None = Field(default=None, max_length=2000, description="SPEC of the data; default: random inputs")
    microbatch_sizes: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = Field(min_length=1, max_length=64)
    dtype: Dtype = "float32"
    autocast: Literal["bfloat16", "float16"] | None = Field(
        default=None, description="what blocks with float32 weights compute in, as in a run"
    )
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = "sgd"
    sequence_length: SequenceLength = None
    devices: int = Field(default=1, ge=1, le=64, description="devices of the node to measure on, and to register")
    warm_up_rounds: int = Field(default=2, ge=0, le=1000)
    rounds: int = Field(default=5, ge=1, le=10000)
    seconds: float = Field(
        default=1.0,
        ge=0,
        le=3600,
        description="measure each size for so long; up to 10 times as long while rounds differ",
    )
    agents: Agents = ()


class LinksTask(WireModel):
    """Measure bandwidth and latency between the devices of a node, and between several nodes."""

    kind: Literal["links"] = "links"
    devices: int = Field(default=2, ge=1, le=64, description="devices of each node")
    nodes: int = Field(default=1, ge=1, le=1024)
    repeats: int = Field(default=10, ge=2, le=1000, description="round trips of each size that are timed")
    agents: Agents = ()


class RunTask(WireModel):
    """Execute a plan through torchrun, on one node or spread evenly over several that share a folder.

    Besides the fields that name the run, it has the fields of TrainingOptions.
    """

    kind: Literal["run"] = "run"
    plan_id: str = Field(min_length=1, max_length=64)
    model: str = Field(min_length=1, max_length=2000)
    data: str = Field(min_length=1, max_length=2000)
    loss: str | None = Field(default=None, max_length=2000)
    steps: int = Field(ge=1, le=10_000_000)
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    learning_rate: float | None = Field(default=None, gt=0, le=1000, description=f"by default {DESCRIBED_RATES}")
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0, le=10_000_000)
    decay_steps: int | None = Field(default=None, ge=1, le=10_000_000, description="by default the run's steps")
    clip_norm: float | None = Field(default=None, gt=0, description="of the whole model's gradient")
    batch_norm: Literal["microbatch", "minibatch"] | None = Field(
        default=None, description="what its statistics are of"
    )
    autocast: Literal["bfloat16", "float16"] | None = Field(default=None, description="by default the plan's own")
    loss_scale: float | None = Field(default=None, gt=0, description="the first value of a dynamic scale")
    checkpoint_every: int = Field(default=0, ge=0)
    concatenate: bool = Field(default=False, description="2BP: weight gradients of several microbatches as one product")
    nodes: int = Field(default=1, ge=1, le=1024, description="must divide the plan's workers")
    agents: Agents = ()

    @property
    def training(self) -> TrainingOptions:
        return TrainingOptions(**{field.name: getattr(self, field.name) for field in fields(TrainingOptions)})


class PlanTask(WireModel):
    """Ask a planner. The service's own solver processes do it; agents never get such a task."""

    kind: Literal["plan"] = "plan"
    request: PlanRequest


Task = Annotated[ProfileTask | EstimateTask | LinksTask | RunTask | PlanTask, Field(discriminator="kind")]


class UnreadableTask(WireModel):
    """Stands for a task that this release cannot read, because another release stored it. Nobody gets such a job."""

    kind: Literal["unreadable"] = "unreadable"
    stored_kind: str = Field(description="the kind under which it was stored")
    reason: str = Field(description="what this release does not understand")


StoredTask = Annotated[
    ProfileTask | EstimateTask | LinksTask | RunTask | PlanTask | UnreadableTask, Field(discriminator="kind")
]
"""The tasks of stored jobs."""

AgentTask = ProfileTask | EstimateTask | LinksTask | RunTask
"""The tasks of agents."""

JobState = Literal["queued", "leased", "succeeded", "failed", "cancelled", "dead"]
"""`failed`: its owner reported an error. `dead`: given up after the last attempt; no attempt was completed."""


class Progress(WireModel):
    """A job's progress: `done` of `total` units, and its current work in a few words."""

    done: int = Field(ge=0)
    total: int = Field(ge=0)
    message: str = Field(default="", max_length=500)


class Job(WireModel):
    """A job as everybody sees it. A run has its id from the start; other ids are set once the job has succeeded.

    An estimate's profile is set earlier: its job then continues as a plan job, with another task. A plan job that finds
    that no plan fits has also succeeded: it has `infeasible`, the reasons, instead of a plan's id.
    """

    id: str
    task: StoredTask
    state: JobState
    attempts: int
    agent: str | None = None
    agents: tuple[str, ...] = Field(default=(), description="those of a run over several nodes, by node rank")
    fence: int = Field(
        default=0, description="counts the leases given on it: of two owners, the one with the higher number holds it"
    )
    lease_expires_at: datetime | None = None
    not_before: datetime | None = Field(default=None, description="when it may be tried again")
    waiting_for: str | None = Field(default=None, description="why no agent takes it now, where that is known")
    progress: Progress | None = None
    error: str | None = None
    profile_id: str | None = None
    cluster_id: str | None = None
    run_id: str | None = None
    plan_id: str | None = None
    infeasible: Infeasible | None = None
    solve_time_s: float | None = None
    asked_by: str | None = Field(default=None, description="the name of the token that asked for it, or `local`")
    created_at: datetime
    updated_at: datetime


class JobQuery(ListQuery):
    """Which jobs, and in which order: with a minus, newest first, which is the default."""

    sort: Literal["created_at", "-created_at"] | None = None
    state: list[JobState] = Field(default_factory=list, max_length=6, description="in one of these states")
    kind: Literal["profile", "estimate", "links", "run", "plan"] | None = None
    agent: Name | None = Field(default=None, description="whose agent it is, or was last")


AgentKind = Literal["profile", "estimate", "links", "run"]


class LeaseRequest(WireModel):
    """An idle agent asks for work. `kinds` are those that it can do.

    A registered agent sends its `instance`: it gets only jobs that it can do, and parts of runs over several nodes. A
    job that was lost in transit with an earlier answer is given again.
    """

    agent: AgentName
    kinds: tuple[AgentKind, ...] = ("profile", "estimate", "links", "run")
    instance: Instance | None = None


class Gang(WireModel):
    """An agent's place among those that do one job together. Node rank 0 is the rendezvous, and reports the result."""

    node_rank: int = Field(ge=0)
    agents: tuple[str, ...] = Field(description="the agents, by node rank")
    address: str = Field(description="the rendezvous")
    port: int

    @property
    def nodes(self) -> int:
        return len(self.agents)


class Lease(WireModel):
    """A job and the token under which its owner reports. The lease ends unless a heartbeat comes in time."""

    job: Job
    token: str
    expires_in_s: float
    gang: Gang | None = None


class Heartbeat(WireModel):
    """The owner is alive; the answer says whether it should continue."""

    token: str
    progress: Progress | None = None


class HeartbeatAnswer(WireModel):
    """`cancelled` asks the owner to stop. So does `stop`, with the reason, if others of a gang have ended."""

    expires_in_s: float
    cancelled: bool
    stop: str | None = None


class ProfileResult(WireModel):
    """The result of a profile job. It is stored together with the job's end, in one transaction."""

    kind: Literal["profile"] = "profile"
    profile: Profile
    cluster: Cluster


class RunResult(WireModel):
    """The result of a run job."""

    kind: Literal["run"] = "run"
    report: RunReport
    timeline: TimelineDocument


class LinksResult(WireModel):
    """The measured links between devices, stored as a cluster."""

    kind: Literal["links"] = "links"
    cluster: Cluster


class PartResult(WireModel):
    """The end of a gang's member other than the first: its part is done, the first one has the result."""

    kind: Literal["part"] = "part"


ReportId = Annotated[
    str | None,
    Field(pattern=r"^[A-Za-z0-9_-]{8,64}$", description="names a report: the same report is accepted only once"),
]
AgentResult = ProfileResult | EstimateResult | LinksResult | RunResult | PartResult


class Completion(WireModel):
    """The owner's final report on a job that succeeded."""

    token: str
    report_id: ReportId = None
    result: Annotated[AgentResult, Field(discriminator="kind")]


class Failure(WireModel):
    """The owner's final report on a job that failed; `error` is one sentence for the user.

    `retry`: the cause is outside of the job, such as a lost node, and another attempt may succeed.
    """

    token: str
    report_id: ReportId = None
    error: str = Field(min_length=1, max_length=4000, pattern=NO_NULL)
    retry: bool = False


class Release(WireModel):
    """The owner hands the job back unfinished because it drains; this does not count as an attempt."""

    token: str
    report_id: ReportId = None


def parse_task(content: bytes) -> Task:
    """The task in a JSON text, its SPECs checked. Raises InvalidInputError.

    The task classes accept any text as a SPEC, because jobs of earlier versions must stay readable.
    """
    try:
        task = parse_sent(cast(type[AgentTask | PlanTask], Task), content)
    except InvalidInputError as error:
        raise _without_tag(error, "") from error
    require_specs(task)
    return task


def parse_completion(content: bytes) -> Completion:
    """The completion in a JSON text. Raises InvalidInputError."""
    try:
        return parse_sent(Completion, content)
    except InvalidInputError as error:
        raise _without_tag(error, "result.") from error


def _without_tag(error: InvalidInputError, place: str) -> InvalidInputError:
    """The path from pydantic includes the chosen kind, which is not a key of the document."""
    for kind in KINDS:
        if error.field.startswith(f"{place}{kind}."):
            field = place + error.field.removeprefix(f"{place}{kind}.")
            return InvalidInputError(field, error.rule, error.value)
    return error
