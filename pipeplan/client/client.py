"""The service's client: documents and errors of the core in and out. Used by the commands, scripts and tests."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

from pipeplan.client.connection import DEFAULT_URL, Connection
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import dump, parse, parse_plan
from pipeplan.documents.plan import Answer, Infeasible, Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, NotFoundError, ServiceError
from pipeplan.programs.timeline import Timeline
from pipeplan.programs.timeline_document import TimelineDocument
from pipeplan.protocol.agents import Agent
from pipeplan.protocol.documents import ClusterSummary, ProfileSummary
from pipeplan.protocol.estimates import ModelPlanRequest
from pipeplan.protocol.jobs import Job, Task
from pipeplan.protocol.listing import Page
from pipeplan.protocol.plans import (
    Alias,
    AliasMove,
    AliasTarget,
    Alternatives,
    Comparison,
    PlanQuery,
    PlanRequest,
    PlanSummary,
    Streams,
    is_plan_id,
    require_name,
)
from pipeplan.protocol.runs import Event, Run, RunSummary, events_in

POLL_S = 0.3
"""Between two looks at a job, and before a stream of events that broke off is asked for again."""

PATIENCE_S = 60.0
"""After so long without an event, a stream that breaks off is an error."""

SILENCE_S = 45.0
"""A stream of events that says nothing for so long is broken: it says something three times as often."""

ENDED = ("succeeded", "failed", "cancelled", "dead")
"""The states in which a job stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """What a planner answered: a plan with its id, or the reasons why none fits."""

    answer: Answer
    plan_id: str | None
    solve_time_s: float


class ServiceClient:
    """A service by its URL. Every method raises the error that the service reports, ServiceError if out of reach."""

    def __init__(self, url: str = DEFAULT_URL, token: str | None = None) -> None:
        self._connection = Connection(url=url, token=token)

    def __enter__(self) -> "ServiceClient":
        """The client itself; it is closed with the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends the connection."""
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def ready(self) -> None:
        """Returns if the service can work."""
        self._connection.get("/readyz")

    def create_profile(self, profile: Profile) -> ProfileSummary:
        """Stores a profile; one with the same content is stored once."""
        return parse(ProfileSummary, self._connection.post("/v1/profiles", dump(profile)))

    def profile(self, profile_id: str) -> Profile:
        """A stored profile."""
        return parse(Profile, self._connection.get(f"/v1/profiles/{profile_id}"))

    def profiles(self, *, limit: int = 50, cursor: str | None = None) -> Page[ProfileSummary]:
        """The profiles, newest first."""
        return parse(Page[ProfileSummary], self._connection.get("/v1/profiles", {"limit": limit, "cursor": cursor}))

    def create_cluster(self, cluster: Cluster) -> ClusterSummary:
        """Stores a cluster; one with the same content is stored once."""
        return parse(ClusterSummary, self._connection.post("/v1/clusters", dump(cluster)))

    def cluster(self, cluster_id: str) -> Cluster:
        """A stored cluster."""
        return parse(Cluster, self._connection.get(f"/v1/clusters/{cluster_id}"))

    def clusters(self, *, limit: int = 50, cursor: str | None = None) -> Page[ClusterSummary]:
        """The clusters, newest first."""
        return parse(Page[ClusterSummary], self._connection.get("/v1/clusters", {"limit": limit, "cursor": cursor}))

    def create_plan(
        self,
        request: PlanRequest | ModelPlanRequest,
        *,
        wait_s: int | None = None,
        on_progress: Callable[[Job], None] | None = None,
        idempotency_key: str | None = None,
    ) -> PlanAnswer:
        """Asks a planner, and waits for its answer.

        With `wait_s`, a search that takes longer becomes a job: it goes on whatever happens to this connection, takes
        as long as it needs, and reports its progress to `on_progress`. An interrupt then cancels it. A request for a
        model without a profile, which an agent estimates first, always is such a job.
        Raises ServiceError if the job ends without an answer.
        """
        prefer = {} if wait_s is None else {"Prefer": f"respond-async, wait={wait_s}"}
        headers = prefer | ({} if idempotency_key is None else {"Idempotency-Key": idempotency_key})
        document = json.loads(self._connection.post("/v1/plans", dump(request), headers=headers))
        if "feasible" in document:  # the answer, and no job
            feasible, solve_time_s = document["feasible"], float(document["solve_time_s"])
            if feasible:
                return PlanAnswer(answer=parse_plan(document), plan_id=document["id"], solve_time_s=solve_time_s)
            reasons = {key: value for key, value in document.items() if key not in ("feasible", "solve_time_s")}
            return PlanAnswer(answer=parse(Infeasible, reasons), plan_id=None, solve_time_s=solve_time_s)

        try:
            job = self.wait_for_job(document["id"], on_progress=on_progress)
            answer = self.plan(job.plan_id) if job.plan_id is not None else job.infeasible
            if answer is None:
                raise ServiceError(f"no plan was made, the job {job.id} is {job.state}: {job.error}")
            return PlanAnswer(answer=answer, plan_id=job.plan_id, solve_time_s=job.solve_time_s or 0.0)
        except KeyboardInterrupt:
            self.cancel_job(document["id"])
            raise

    def plan(self, plan_id: str) -> Plan:
        """A stored plan."""
        return parse_plan(self._connection.get(f"/v1/plans/{plan_id}"))

    def plans(self, query: PlanQuery | None = None, *, limit: int = 50, cursor: str | None = None) -> Page[PlanSummary]:
        """The plans that the query asks for, or all; newest first, or in its order."""
        asked = query or PlanQuery(limit=limit, cursor=cursor)
        parameters = asked.model_dump(mode="json", exclude_defaults=True, exclude={"content"})
        return parse(Page[PlanSummary], self._connection.get("/v1/plans", parameters))

    def plan_id(self, name: str) -> str:
        """The id of a plan that is named by id or by alias. Raises NotFoundError."""
        if is_plan_id(name):
            return name
        try:
            require_name(name)
            return self.alias(name).plan_id
        except (InvalidInputError, NotFoundError) as error:
            raise NotFoundError(f"there is no plan {name}, nor an alias of that name") from error

    def compare_plans(self, plan_ids: list[str]) -> Comparison:
        """Plans side by side: what differs, and what makes each faster or slower than the first."""
        return parse(Comparison, self._connection.get("/v1/plans/compare", {"id": plan_ids}))

    def plan_alternatives(self, plan_id: str) -> Alternatives:
        """What a plan was chosen over, and why."""
        return parse(Alternatives, self._connection.get(f"/v1/plans/{plan_id}/alternatives"))

    def export_plan(self, plan_id: str, format_name: str, target_version: str | None = None) -> str:
        """A plan for another system, of a version where that matters."""
        path = f"/v1/plans/{plan_id}/exports/{quote(format_name, safe='')}"
        return self._connection.get(path, {"target_version": target_version}).decode()

    def set_alias(self, name: str, plan_id: str, *, if_version: int | None = None, only_new: bool = False) -> Alias:
        """Points an alias at a plan; with a version, only if it has that still. Raises PreconditionFailedError."""
        headers = _matching(if_version) | ({"If-None-Match": "*"} if only_new else {})
        body = AliasTarget(plan_id=plan_id).model_dump_json()
        return parse(Alias, self._connection.put(_alias_path(name), body, headers=headers))

    def alias(self, name: str) -> Alias:
        """Where an alias points."""
        return parse(Alias, self._connection.get(_alias_path(name)))

    def aliases(self, *, plan_id: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[Alias]:
        """The aliases, newest first; those of one plan only where one is named."""
        asked = {"plan_id": plan_id, "limit": limit, "cursor": cursor}
        return parse(Page[Alias], self._connection.get("/v1/aliases", asked))

    def alias_history(self, name: str, *, limit: int = 50, cursor: str | None = None) -> Page[AliasMove]:
        """What an alias pointed at, the latest first."""
        asked = {"limit": limit, "cursor": cursor}
        return parse(Page[AliasMove], self._connection.get(f"{_alias_path(name)}/history", asked))

    def delete_alias(self, name: str, *, if_version: int | None = None) -> None:
        """Takes an alias away; its history stays."""
        self._connection.delete(_alias_path(name), headers=_matching(if_version))

    def plan_streams(self, plan_id: str, *, batches: int = 1) -> Streams:
        """What every worker executes."""
        return parse(Streams, self._connection.get(f"/v1/plans/{plan_id}/streams", {"batches": batches}))

    def plan_timeline(self, plan_id: str, *, batches: int = 2) -> Timeline:
        """The predicted timeline."""
        return parse(
            TimelineDocument, self._connection.get(f"/v1/plans/{plan_id}/timeline", {"batches": batches})
        ).timeline()

    def plan_trace(self, plan_id: str, *, batches: int = 2) -> str:
        """The predicted timeline as a Chrome trace."""
        return self._connection.get(f"/v1/plans/{plan_id}/trace", {"batches": batches}).decode()

    def enqueue_job(self, task: Task, *, idempotency_key: str | None = None) -> Job:
        """Enqueues a job for an agent. With a key, the same call again gives the same job."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return parse(Job, self._connection.post("/v1/jobs", dump(task), headers=headers))

    def job(self, job_id: str) -> Job:
        """A job."""
        return parse(Job, self._connection.get(f"/v1/jobs/{job_id}"))

    def jobs(self, *, limit: int = 50, cursor: str | None = None) -> Page[Job]:
        """The jobs, newest first."""
        return parse(Page[Job], self._connection.get("/v1/jobs", {"limit": limit, "cursor": cursor}))

    def cancel_job(self, job_id: str) -> Job:
        """Cancels a job that has not ended."""
        return parse(Job, self._connection.post(f"/v1/jobs/{job_id}/cancel"))

    def retry_job(self, job_id: str) -> Job:
        """Puts a job back that has failed, died or been cancelled."""
        return parse(Job, self._connection.post(f"/v1/jobs/{job_id}/retry"))

    def agents(self, *, limit: int = 50, cursor: str | None = None) -> Page[Agent]:
        """The agents, newest first."""
        return parse(Page[Agent], self._connection.get("/v1/agents", {"limit": limit, "cursor": cursor}))

    def wait_for_job(
        self,
        job_id: str,
        *,
        on_progress: Callable[[Job], None] | None = None,
        while_waiting: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> Job:
        """Waits until the job has ended, in whichever state. `on_progress` is called with every change.

        `while_waiting` is called at every look, and may raise to end the waiting. Raises ServiceError once the
        timeout is over. In both cases the job goes on.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        seen: Job | None = None
        while True:
            job = self.job(job_id)
            if on_progress is not None and (seen is None or _news(job) != _news(seen)):
                on_progress(job)
            if job.state in ENDED:
                return job
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise ServiceError(f"job {job_id} has not ended within {timeout_s} s; it is {job.state}")
            if while_waiting is not None:
                while_waiting()
            seen = job
            time.sleep(POLL_S)

    def follow_job(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """What happens to a job, as it happens, from its start or after an event, until the job has ended.

        A connection that breaks is made again, and goes on after the last event. Raises ServiceError if that does not
        succeed within a minute.
        """
        return self._follow(f"/v1/jobs/{job_id}/events", after)

    def follow_run(self, run_id: str, *, after: int = 0) -> Iterator[Event]:
        """What happens to a run, likewise."""
        return self._follow(f"/v1/runs/{run_id}/events", after)

    def run(self, run_id: str) -> Run:
        """A run, with its report once it has succeeded."""
        return parse(Run, self._connection.get(f"/v1/runs/{run_id}"))

    def runs(self, *, plan_id: str | None = None, limit: int = 50, cursor: str | None = None) -> Page[RunSummary]:
        """The runs, newest first."""
        asked = {"plan_id": plan_id, "limit": limit, "cursor": cursor}
        return parse(Page[RunSummary], self._connection.get("/v1/runs", asked))

    def run_timeline(self, run_id: str) -> Timeline:
        """The measured timeline."""
        return parse(TimelineDocument, self._connection.get(f"/v1/runs/{run_id}/timeline")).timeline()

    def run_trace(self, run_id: str) -> str:
        """The predicted and the measured timeline as one Chrome trace."""
        return self._connection.get(f"/v1/runs/{run_id}/trace").decode()

    def _follow(self, path: str, after: int) -> Iterator[Event]:
        heard_s = time.monotonic()
        ended = False
        while not ended:
            try:
                with self._connection.lines(path, {"Last-Event-ID": str(after)}, silence_s=SILENCE_S) as lines:
                    if next(lines, None) is None:
                        return  # an empty answer: it had ended before
                    for event in events_in(lines):
                        after, ended, heard_s = event.number, event.ends, time.monotonic()
                        yield event
            except ServiceError:
                if time.monotonic() - heard_s > PATIENCE_S:
                    raise
            if not ended:
                time.sleep(POLL_S)


def _alias_path(name: str) -> str:
    require_name(name)
    return f"/v1/aliases/{name}"


def _matching(version: int | None) -> dict[str, str]:
    return {} if version is None else {"If-Match": f'"{version}"'}


def _news(job: Job) -> tuple[object, ...]:
    """What makes two looks at a job differ."""
    return (job.state, job.attempts, job.progress)
