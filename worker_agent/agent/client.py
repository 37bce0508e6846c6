"""Client of the agent: takes work from the service and reports under the lease.

`Heart` renews a lease from a thread of its own: a service that does not answer never holds up the agent.
"""

import threading
import time
from collections.abc import Callable

import httpx

from pipeplan.client.connection import Connection, RetryClock
from pipeplan.client.exchange import DEFAULT_URL
from pipeplan.documents.files import dump, parse, parse_plan
from pipeplan.documents.plan import Plan
from pipeplan.errors import LeaseLostError, PipeplanError
from pipeplan.protocol.agents import Agent, Presence, Registration
from pipeplan.protocol.jobs import Heartbeat, HeartbeatAnswer, Job, Lease, LeaseRequest, Progress, Release

PATIENCE_S = 2.0
"""How long a report is retried before it waits in the spool for the next delivery."""

_TELL_S = 0.3
_LEAST_S = 0.1


class AgentClient:
    """A service by its URL. Every method raises the error that the service reports, ServiceError if it is out of reach.

    LeaseLostError: the job is no longer this agent's; stop, and report nothing more.
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
        self.close()

    def close(self) -> None:
        self._connection.close()

    def register(self, told: Registration) -> Agent:
        """Registers this agent. May be repeated."""
        return parse(Agent, self._connection.post("/v1/agents", dump(told)))

    def present(self, name: str, presence: Presence) -> Agent:
        """Reports that the agent is alive, and whether it drains."""
        return parse(Agent, self._connection.post(f"/v1/agents/{name}/heartbeat", dump(presence)))

    def lease(self, request: LeaseRequest) -> Lease | None:
        """The oldest job that this agent can do, or None."""
        answer = self._connection.post("/v1/jobs/lease", dump(request))
        return parse(Lease, answer) if answer else None

    def heartbeat(self, lease: Lease, progress: Progress | None = None) -> HeartbeatAnswer:
        """Renews the lease; the answer says whether to continue."""
        beat = Heartbeat(token=lease.token, progress=progress)
        return parse(HeartbeatAnswer, self._connection.post(f"/v1/jobs/{lease.job.id}/heartbeat", dump(beat)))

    def report(self, path: str, body: str) -> Job:
        """Sends a job's end, and retries for a while if the service does not accept it yet."""
        return parse(Job, self._connection.post(path, body, patience_s=self._patience_s))

    def release(self, lease: Lease) -> Job:
        """Hands the job back."""
        release = Release(token=lease.token)
        return parse(Job, self._connection.post(f"/v1/jobs/{lease.job.id}/release", dump(release)))

    def job(self, job_id: str) -> Job:
        """A job as it is now. Raises NotFoundError if the service does not know it."""
        return parse(Job, self._connection.get(f"/v1/jobs/{job_id}"))

    def plan(self, plan_id: str) -> Plan:
        return parse_plan(self._connection.get(f"/v1/plans/{plan_id}"))


class Heart:
    """Beats until it is stopped, or the service says that the job should stop.

    `ends_s` is when the lease expires by this node's clock, counted from the request of the last renewal: never later
    than by the service's clock. A service that is away, and refuses the connection, will give every lease its whole
    length again when it starts. `cut_off`: at the last try nothing answered that could show that the service is away.
    """

    def __init__(self, client: AgentClient, lease: Lease, progress: Callable[[], Progress | None]) -> None:
        self.ends_s = time.monotonic() + lease.expires_in_s
        self.cut_off = False
        self.cancelled = False
        self.lost: LeaseLostError | None = None
        self.stop_reason: str | None = None
        self._client = client
        self._lease = lease
        self._progress = progress
        self._told: Progress | None = None
        self._asked_s: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops, without waiting for a beat in progress."""
        self._stop.set()

    @property
    def over(self) -> bool:
        return self.cancelled or self.lost is not None or self.stop_reason is not None

    def cut_off_at(self, now_s: float) -> bool:
        """Whether nothing has answered lately: the last try found nothing, or the present one takes long."""
        asked_s = self._asked_s
        return self.cut_off or (asked_s is not None and now_s - asked_s > self._lease.expires_in_s / 6)

    def finish(self) -> None:
        """Reports the last progress, once the job's process has ended."""
        self.stop()
        self._thread.join(_TELL_S)
        if self._progress() != self._told and not self.over and not self.cut_off:
            self._beat()

    def _run(self) -> None:
        interval_s = max(self._lease.expires_in_s / 3, _LEAST_S)
        beaten_s = time.monotonic()
        while not self._stop.wait(_LEAST_S) and not self.over:
            news = self._progress() != self._told
            if time.monotonic() - beaten_s >= (min(interval_s, _TELL_S) if news else interval_s):
                beaten_s = time.monotonic()
                self._beat()

    def _beat(self) -> None:
        """Renews once. A service out of reach does not stop the work: the end is reported when it is back."""
        progress, asked_s = self._progress(), time.monotonic()
        self._asked_s = asked_s
        try:
            answer = self._client.heartbeat(self._lease, progress)
        except LeaseLostError as error:
            self.lost = error
        except PipeplanError as error:
            self.cut_off = is_cut_off(error)
            if is_refused(error):
                self.ends_s = max(self.ends_s, asked_s + self._lease.expires_in_s)
        else:
            self._told, self.cut_off = progress, False
            self.cancelled, self.stop_reason = answer.cancelled, answer.stop
            self.ends_s = asked_s + answer.expires_in_s
        finally:
            self._asked_s = None


def is_cut_off(error: PipeplanError) -> bool:
    """Whether this node may be cut off while others are not: nothing answered at all.

    A refused connection, or any answer, comes from the service's machine: the service is away for others, too.
    """
    return isinstance(error.__cause__, httpx.TransportError) and not is_refused(error)


def is_refused(error: PipeplanError) -> bool:
    """Whether the connection was refused: the service's machine is there, the service is not."""
    cause: BaseException | None = error.__cause__
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError) or "Connection refused" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
