"""The agent's client: takes work from the service and reports under the lease."""

import httpx

from pipeplan.client.connection import DEFAULT_URL, Connection, RetryClock
from pipeplan.documents.files import dump, parse, parse_plan
from pipeplan.documents.plan import Plan
from pipeplan.errors import PipeplanError
from pipeplan.protocol.agents import Agent, Presence, Registration
from pipeplan.protocol.jobs import Heartbeat, HeartbeatAnswer, Job, Lease, LeaseRequest, Progress, Release

PATIENCE_S = 2.0
"""How long a report is sent again before it waits for the next time; it lies in the spool meanwhile."""


class AgentClient:
    """A service by its URL. Every method raises what the service tells of, ServiceError if it is out of reach.

    LeaseLostError says that the job is no longer this agent's: stop, and report nothing more.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        *,
        patience_s: float = PATIENCE_S,
        transport: httpx.BaseTransport | None = None,
        clock: RetryClock | None = None,
    ) -> None:
        self._connection = Connection(url=url, token=token, transport=transport, clock=clock or RetryClock())
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

    def register(self, told: Registration) -> Agent:
        """Says who this agent is. May be repeated."""
        return parse(Agent, self._connection.post("/v1/agents", dump(told)))

    def present(self, name: str, presence: Presence) -> Agent:
        """Says that the agent is there, and whether it drains."""
        return parse(Agent, self._connection.post(f"/v1/agents/{name}/heartbeat", dump(presence)))

    def lease(self, request: LeaseRequest) -> Lease | None:
        """The oldest job that this agent can do; None where there is none."""
        answer = self._connection.post("/v1/jobs/lease", dump(request))
        return parse(Lease, answer) if answer else None

    def heartbeat(self, lease: Lease, progress: Progress | None = None) -> HeartbeatAnswer:
        """Renews the lease; the answer says whether to go on."""
        beat = Heartbeat(token=lease.token, progress=progress)
        return parse(HeartbeatAnswer, self._connection.post(f"/v1/jobs/{lease.job.id}/heartbeat", dump(beat)))

    def report(self, path: str, body: str) -> Job:
        """Sends a job's end, for a while again where the service does not take it yet."""
        return parse(Job, self._connection.post(path, body, patience_s=self._patience_s))

    def release(self, lease: Lease) -> Job:
        """Hands the job back."""
        release = Release(token=lease.token)
        return parse(Job, self._connection.post(f"/v1/jobs/{lease.job.id}/release", dump(release)))

    def plan(self, plan_id: str) -> Plan:
        """A stored plan."""
        return parse_plan(self._connection.get(f"/v1/plans/{plan_id}"))


def is_cut_off(error: PipeplanError) -> bool:
    """Whether this node may be cut off, and others not: nothing answered, not even that the service is not there.

    A refused connection, or any answer, comes from where the service is: it is away for others, too.
    """
    cause: BaseException | None = error.__cause__
    if not isinstance(cause, httpx.TransportError):
        return False
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError) or "Connection refused" in str(cause):
            return False
        cause = cause.__cause__ or cause.__context__
    return True
