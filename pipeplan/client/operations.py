"""Operations: every request to the service, once for both clients.

Each is a method that yields requests and returns their result (`client.exchange`); lists and streams of events are
read item by item (`client.reading`).
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from pipeplan.client.exchange import Pause, ServiceExchange, Steps, answered, promised
from pipeplan.client.reading import Following, Pages
from pipeplan.documents.calibration import Calibration
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, parse, parse_plan
from pipeplan.documents.plan import Answer, Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, NotFoundError, ServiceError, require, require_count
from pipeplan.programs.timeline import Timeline
from pipeplan.programs.timeline_document import TimelineDocument
from pipeplan.protocol.agents import Agent, AgentQuery
from pipeplan.protocol.audit import AuditEntry, AuditQuery
from pipeplan.protocol.documents import ClusterQuery, ClusterSummary, ProfileQuery, ProfileSummary
from pipeplan.protocol.estimates import ModelPlanRequest
from pipeplan.protocol.jobs import Job, JobQuery, Task
from pipeplan.protocol.listing import ListQuery, Matches, Page
from pipeplan.protocol.plans import (
    Alias,
    AliasMove,
    AliasQuery,
    AliasTarget,
    Alternatives,
    Comparison,
    PlanQuery,
    PlanRequest,
    PlanSummary,
    Streams,
    is_plan_id,
    is_short_id,
    require_name,
)
from pipeplan.protocol.runs import Run, RunQuery, RunSummary
from pipeplan.protocol.tokens import Whoami

T = TypeVar("T")

POLL_S = 0.3
"""Seconds between two looks at a job."""

ENDED = ("succeeded", "failed", "cancelled", "dead")
"""The final states of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """A planner's answer: a plan with its id, or the reasons why none fits."""

    answer: Answer
    plan_id: str | None
    solve_time_s: float

    @classmethod
    def of(cls, document: dict[str, Any]) -> "PlanAnswer":
        """The answer in a service's document."""
        solve_time_s = float(document["solve_time_s"])
        if document["feasible"]:
            return cls(answer=parse_plan(document), plan_id=document["id"], solve_time_s=solve_time_s)
        reasons = {key: value for key, value in document.items() if key not in ("feasible", "solve_time_s")}
        return cls(answer=parse(Infeasible, reasons), plan_id=None, solve_time_s=solve_time_s)


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations, by way of one exchange."""

    exchange: ServiceExchange

    def ready(self) -> Steps[None]:
        """Returns if the service can work."""
        yield from self.exchange.get("/readyz")

    def whoami(self) -> Steps[Whoami]:
        """Who the caller is, by its token, and what it may do."""
        return answered(Whoami, (yield from self.exchange.get("/v1/tokens/self")))

    def create_profile(self, profile: Profile) -> Steps[ProfileSummary]:
        """Stores a profile. Profiles with the same content are stored once."""
        return answered(ProfileSummary, (yield from self._post("/v1/profiles", dump(profile))))

    def profile(self, profile_id: str) -> Steps[Profile]:
        """A stored profile."""
        return answered(Profile, (yield from self.exchange.get(f"/v1/profiles/{_part(profile_id)}")))

    def profile_id(self, name: str) -> Steps[str]:
        """The id of a profile by a prefix of it. Raises NotFoundError, InvalidInputError if several ids have it."""
        return (yield from self._whole_id("profile", name))

    def profiles(
        self, query: ProfileQuery | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> Pages[ProfileSummary]:
        """The profiles that match the query, or all: newest first, or in the query's order; at most `limit`."""
        return self._pages(ProfileSummary, "/v1/profiles", query or ProfileQuery(), limit, cursor)

    def create_cluster(self, cluster: Cluster) -> Steps[ClusterSummary]:
        """Stores a cluster. Clusters with the same content are stored once."""
        return answered(ClusterSummary, (yield from self._post("/v1/clusters", dump(cluster))))

    def cluster(self, cluster_id: str) -> Steps[Cluster]:
        """A stored cluster."""
        return answered(Cluster, (yield from self.exchange.get(f"/v1/clusters/{_part(cluster_id)}")))

    def cluster_id(self, name: str) -> Steps[str]:
        """The id of a cluster by a prefix of it. Raises NotFoundError, InvalidInputError if several ids have it."""
        return (yield from self._whole_id("cluster", name))

    def clusters(
        self, query: ClusterQuery | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> Pages[ClusterSummary]:
        """The clusters that match the query, or all: newest first, or in the query's order; at most `limit`."""
        return self._pages(ClusterSummary, "/v1/clusters", query or ClusterQuery(), limit, cursor)

    def create_plan(
        self,
        request: PlanRequest | ModelPlanRequest,
        *,
        wait_s: int | None = None,
        on_progress: Callable[[Job], None] | None = None,
        idempotency_key: str | None = None,
    ) -> Steps[PlanAnswer]:
        """Asks a planner, and waits for its answer.

        With `wait_s`, a search that takes longer becomes a job: it goes on whatever happens to this connection, takes
        as long as it needs, and reports its progress to `on_progress`. An interrupt, or the cancellation of the task
        that awaits, then cancels it. A request for a model without a profile, which an agent estimates first, always
        is such a job. Raises ServiceError if the job ends without an answer.
        """
        prefer = {} if wait_s is None else {"Prefer": f"respond-async, wait={wait_s}"}
        content = yield from self._post("/v1/plans", dump(request), headers=prefer, key=idempotency_key)
        with promised("plan or job"):
            document = json.loads(content)
            if "feasible" in document:  # the answer, and no job
                return PlanAnswer.of(document)
            job_id = str(document["id"])
        try:
            job = yield from self.wait_for_job(job_id, on_progress=on_progress)
            answer = (yield from self.plan(job.plan_id)) if job.plan_id is not None else job.infeasible
            if answer is None:
                raise ServiceError(f"no plan was made: {job.error or job.state} (job {job.id})")
            return PlanAnswer(answer=answer, plan_id=job.plan_id, solve_time_s=job.solve_time_s or 0.0)
        except (KeyboardInterrupt, asyncio.CancelledError):
            yield from self.cancel_job(job_id)
            raise

    def plan(self, plan_id: str) -> Steps[Plan]:
        """A stored plan."""
        content = yield from self.exchange.get(f"/v1/plans/{_part(plan_id)}")
        with promised("plan"):
            return parse_plan(content)

    def plan_request(self, plan_id: str) -> Steps[PlanRequest]:
        """The request with which the plan was first stored: planner, batch, options, calibration."""
        return answered(PlanRequest, (yield from self.exchange.get(f"/v1/plans/{_part(plan_id)}/request")))

    def plans(
        self, query: PlanQuery | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> Pages[PlanSummary]:
        """The plans that match the query, or all: newest first, or in the query's order; at most `limit`."""
        require(query is None or not query.content, "content", "must be false: the client lists summaries", True)
        return self._pages(PlanSummary, "/v1/plans", query or PlanQuery(), limit, cursor)

    def plan_id(self, name: str) -> Steps[str]:
        """The id of a plan by its id, an alias, or a prefix of its id, in this order.

        Raises NotFoundError, InvalidInputError if several ids have the prefix.
        """
        if is_plan_id(name):
            return name
        try:
            require_name(name)
            return (yield from self.alias(name)).plan_id
        except (InvalidInputError, NotFoundError) as error:
            if is_short_id(name):
                return (yield from self._whole_id("plan", name))
            raise NotFoundError(f"there is no plan {name}, nor an alias of that name") from error

    def compare_plans(self, plan_ids: list[str]) -> Steps[Comparison]:
        """Plans side by side: what differs, and what makes each faster or slower than the first."""
        return answered(Comparison, (yield from self.exchange.get("/v1/plans/compare", {"id": plan_ids})))

    def plan_alternatives(self, plan_id: str) -> Steps[Alternatives]:
        """The alternatives to a plan, and why each lost."""
        return answered(Alternatives, (yield from self.exchange.get(f"/v1/plans/{_part(plan_id)}/alternatives")))

    def export_plan(self, plan_id: str, format_name: str, target_version: str | None = None) -> Steps[str]:
        """A plan in another system's format; `target_version` where the system's versions differ."""
        path = f"/v1/plans/{_part(plan_id)}/exports/{_part(format_name)}"
        return (yield from self.exchange.get(path, {"target_version": target_version})).decode()

    def set_alias(
        self, name: str, plan_id: str, *, if_version: int | None = None, only_new: bool = False
    ) -> Steps[Alias]:
        """Points an alias at a plan; with `if_version`, only if the alias still has this version.

        With `only_new`, only if there is no such alias yet. Raises PreconditionFailedError if the condition fails.
        """
        headers = _matching(if_version) | ({"If-None-Match": "*"} if only_new else {})
        body = AliasTarget(plan_id=plan_id).model_dump_json()
        return answered(Alias, (yield from self.exchange.put(_alias_path(name), body, headers=headers)))

    def alias(self, name: str) -> Steps[Alias]:
        """An alias, with the plan at which it points."""
        return answered(Alias, (yield from self.exchange.get(_alias_path(name))))

    def aliases(
        self, query: AliasQuery | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> Pages[Alias]:
        """The aliases that match the query, or all: newest first, or in the query's order; at most `limit`."""
        return self._pages(Alias, "/v1/aliases", query or AliasQuery(), limit, cursor)

    def alias_history(self, name: str, *, limit: int | None = None, cursor: str | None = None) -> Pages[AliasMove]:
        """The plans at which an alias has pointed, the latest first."""
        return self._pages(AliasMove, f"{_alias_path(name)}/history", ListQuery(), limit, cursor)

    def delete_alias(self, name: str, *, if_version: int | None = None) -> Steps[None]:
        """Deletes an alias; its history stays."""
        yield from self.exchange.delete(_alias_path(name), headers=_matching(if_version))

    def plan_streams(self, plan_id: str, *, batches: int = 1) -> Steps[Streams]:
        """The instructions of every worker."""
        path = f"/v1/plans/{_part(plan_id)}/streams"
        return answered(Streams, (yield from self.exchange.get(path, {"batches": batches})))

    def plan_timeline(self, plan_id: str, *, batches: int = 2) -> Steps[Timeline]:
        """The predicted timeline."""
        path = f"/v1/plans/{_part(plan_id)}/timeline"
        return answered(TimelineDocument, (yield from self.exchange.get(path, {"batches": batches}))).timeline()

    def plan_trace(self, plan_id: str, *, batches: int = 2) -> Steps[str]:
        """The predicted timeline as a Chrome trace."""
        return (yield from self.exchange.get(f"/v1/plans/{_part(plan_id)}/trace", {"batches": batches})).decode()

    def enqueue_job(self, task: Task, *, idempotency_key: str | None = None) -> Steps[Job]:
        """Enqueues a job for an agent. With a key, a repeated call gives the same job."""
        return answered(Job, (yield from self._post("/v1/jobs", dump(task), key=idempotency_key)))

    def job(self, job_id: str) -> Steps[Job]:
        """A job."""
        return answered(Job, (yield from self.exchange.get(f"/v1/jobs/{_part(job_id)}")))

    def jobs(self, query: JobQuery | None = None, *, limit: int | None = None, cursor: str | None = None) -> Pages[Job]:
        """The jobs that match the query, or all: newest first, or in the query's order; at most `limit`."""
        return self._pages(Job, "/v1/jobs", query or JobQuery(), limit, cursor)

    def cancel_job(self, job_id: str) -> Steps[Job]:
        """Cancels a job that has not ended."""
        return answered(Job, (yield from self._post(f"/v1/jobs/{_part(job_id)}/cancel")))

    def retry_job(self, job_id: str) -> Steps[Job]:
        """Puts a job that has failed, died or been cancelled back into the queue."""
        return answered(Job, (yield from self._post(f"/v1/jobs/{_part(job_id)}/retry")))

    def agents(
        self, query: AgentQuery | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> Pages[Agent]:
        """The agents that match the query, or all: newest first, or in the query's order; at most `limit`."""
        return self._pages(Agent, "/v1/agents", query or AgentQuery(), limit, cursor)

    def audit(
        self, query: AuditQuery | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> Pages[AuditEntry]:
        """Who did what, for admins: the entries that match the query, or all; at most `limit`."""
        return self._pages(AuditEntry, "/v1/audit", query or AuditQuery(), limit, cursor)

    def wait_for_job(
        self,
        job_id: str,
        *,
        on_progress: Callable[[Job], None] | None = None,
        while_waiting: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> Steps[Job]:
        """Waits until the job has ended, in any state. `on_progress` is called with every change.

        `while_waiting` is called at every look, and may raise to end the waiting. Raises ServiceError once the
        timeout is over. In both cases the job goes on.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        seen: tuple[object, ...] | None = None
        while True:
            job = yield from self.job(job_id)
            news = (job.state, job.attempts, job.progress)
            if on_progress is not None and news != seen:
                on_progress(job)
            if job.state in ENDED:
                return job
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise ServiceError(f"job {job_id} has not ended within {timeout_s} s; it is {job.state}")
            if while_waiting is not None:
                while_waiting()
            seen = news
            yield Pause(duration_s=POLL_S)

    def follow_job(self, job_id: str, *, after: int = 0) -> Following:
        """The events of a job as they happen, from its start or after an event, until the job has ended.

        Reconnects after a broken connection, and continues after the last event. Raises ServiceError if that does not
        succeed within a minute.
        """
        return Following(path=f"/v1/jobs/{_part(job_id)}/events", after=after)

    def follow_run(self, run_id: str, *, after: int = 0) -> Following:
        """The events of a run, in the same way."""
        return Following(path=f"/v1/runs/{_part(run_id)}/events", after=after)

    def run(self, run_id: str) -> Steps[Run]:
        """A run, with its report once it has succeeded."""
        return answered(Run, (yield from self.exchange.get(f"/v1/runs/{_part(run_id)}")))

    def runs(
        self, query: RunQuery | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> Pages[RunSummary]:
        """The runs that match the query, or all: newest first, or in the query's order; at most `limit`."""
        return self._pages(RunSummary, "/v1/runs", query or RunQuery(), limit, cursor)

    def run_timeline(self, run_id: str) -> Steps[Timeline]:
        """The measured timeline."""
        content = yield from self.exchange.get(f"/v1/runs/{_part(run_id)}/timeline")
        return answered(TimelineDocument, content).timeline()

    def calibration(self, run_ids: list[str]) -> Steps[Calibration]:
        """The corrections of their plans' profile and cluster from measured runs: a request's `calibration`."""
        return parse(Calibration, (yield from self.exchange.get("/v1/runs/calibration", {"id": run_ids})))

    def run_trace(self, run_id: str) -> Steps[str]:
        """The predicted and the measured timeline as one Chrome trace."""
        return (yield from self.exchange.get(f"/v1/runs/{_part(run_id)}/trace")).decode()

    def _post(
        self, path: str, body: str | None = None, *, headers: dict[str, str] | None = None, key: str | None = None
    ) -> Steps[bytes]:
        """Sends under the caller's key, or one made for this call: a repetition has no second effect."""
        return self.exchange.post(path, body, headers=headers, key=key or uuid.uuid4().hex)

    def _pages(self, item: type[T], path: str, query: ListQuery, limit: int | None, cursor: str | None) -> Pages[T]:
        if limit is None and "limit" in query.model_fields_set:
            limit = query.limit
        if limit is not None:
            require_count("limit", limit)
        asked = query.model_dump(mode="json", exclude_defaults=True, exclude={"limit", "cursor", "content"})

        def fetch(most: int, following: str | None) -> Steps[Page[T]]:
            content = yield from self.exchange.get(path, asked | {"limit": most, "cursor": following})
            page: Page[T] = answered(Page[item], content)  # type: ignore[valid-type]  # pydantic's, made at run time
            return page

        return Pages(fetch=fetch, limit=limit, next_cursor=cursor or query.cursor)

    def _whole_id(self, noun: str, name: str) -> Steps[str]:
        if is_plan_id(name):
            return name
        if not is_short_id(name):
            raise NotFoundError(f"there is no {noun} {name}")
        found = answered(Matches, (yield from self.exchange.get("/v1/ids", {"noun": noun, "prefix": name})))
        if not found.ids:
            raise NotFoundError(f"there is no {noun} {name}, and no id that begins with it")
        if len(found.ids) > 1:
            named = ", ".join(found.ids) + (", and more" if found.more else "")
            raise InvalidInputError("id", f"must be the prefix of one {noun}'s id, and is that of {named}", name)
        return found.ids[0]


def _part(text: str) -> str:
    """The text as one segment of a path."""
    return quote(text, safe="")


def _alias_path(name: str) -> str:
    require_name(name)
    return f"/v1/aliases/{name}"


def _matching(version: int | None) -> dict[str, str]:
    return {} if version is None else {"If-Match": f'"{version}"'}
