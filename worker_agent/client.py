"""The agent's client: takes work from the service and reports under the lease. Last words are repeated until taken."""

import httpx

from planner_service.contract.documents import dump, parse, parse_plan
from planner_service.contract.http import DEFAULT_URL, Clock, Connection
from planner_service.contract.jobs import (
    Completion,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Job,
    Lease,
    LeaseRequest,
    ProfileResult,
    Progress,
    RunResult,
)
from planner_service.core.plan import Plan

PATIENCE_S = 60.0
MAX_ERROR_CHARACTERS = 4000


class AgentClient:
    """A service by its URL. Every method raises what the service tells of, ServiceError if it is out of reach.

    LeaseLostError says that the job is no longer this agent's: stop, and report nothing more. What ends a job is
    sent again for up to `patience_s` while the service is out of reach; it takes a repetition as the first.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        *,
        patience_s: float = PATIENCE_S,
        transport: httpx.BaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._connection = Connection(url=url, token=token, transport=transport, clock=clock or Clock())
        self._patience_s = patience_s

    def __enter__(self) -> "AgentClient":
        """The client itself; it is closed with the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends the connection."""
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def lease(self, request: LeaseRequest) -> Lease | None:
        """The oldest job that this agent can do; None where there is none."""
        answer = self._connection.post("/v1/jobs/lease", dump(request))
        return parse(Lease, answer) if answer else None

    def heartbeat(self, lease: Lease, progress: Progress | None = None) -> HeartbeatAnswer:
        """Renews the lease; the answer says whether the job was cancelled."""
        beat = Heartbeat(token=lease.token, progress=progress)
        return parse(HeartbeatAnswer, self._connection.post(f"/v1/jobs/{lease.job.id}/heartbeat", dump(beat)))

    def complete(self, lease: Lease, result: ProfileResult | RunResult) -> Job:
        """Ends the job with its result."""
        return self._end(lease, "complete", Completion(token=lease.token, result=result))

    def fail(self, lease: Lease, error: str) -> Job:
        """Ends the job with an error: one sentence for the user."""
        sentence = error[:MAX_ERROR_CHARACTERS] or "the agent gave no reason"
        return self._end(lease, "fail", Failure(token=lease.token, error=sentence))

    def plan(self, plan_id: str) -> Plan:
        """A stored plan."""
        return parse_plan(self._connection.get(f"/v1/plans/{plan_id}"))

    def _end(self, lease: Lease, verb: str, report: Completion | Failure) -> Job:
        path = f"/v1/jobs/{lease.job.id}/{verb}"
        return parse(Job, self._connection.post(path, dump(report), patience_s=self._patience_s))
