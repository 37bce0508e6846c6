"""Agent: takes jobs from the service, one at a time, and reports how they end."""

import secrets
import threading
import time
from collections.abc import Callable

from pipeplan.errors import LeaseLostError, NotFoundError, PipeplanError, ServiceError, TooManyRequestsError
from pipeplan.protocol.agents import Presence
from pipeplan.protocol.jobs import Lease, LeaseRequest
from worker_agent.agent.child import kill_left_behind
from worker_agent.agent.client import AgentClient
from worker_agent.agent.node import Port, registration
from worker_agent.agent.retention import Retention
from worker_agent.agent.settings import AgentSettings
from worker_agent.agent.spool import Spool, SpooledReport, completion, failure, new_report_id
from worker_agent.agent.work import CancelledError, HandedBackError, LeasedWork, StoppedError, Urgency

Log = Callable[[str], None]
MAX_ERROR_CHARACTERS = 4000
_LOOK_S = 0.1


class NodeAgent:
    """One node's agent.

    `stop` may be called from a signal handler. The current job then has `drain_s` to end before it is handed back. A
    second call hands it back at once.
    """

    def __init__(self, settings: AgentSettings, client: AgentClient, log: Log) -> None:
        self._settings = settings
        self._client = client
        self._log = log
        self._stops = 0
        self._instance = secrets.token_hex(16)
        self._spool = Spool(settings.work_dir / "spool")
        self._says_draining = False
        self._retention = Retention(settings, lambda job_id: client.job(job_id).state, log)

    def stop(self) -> None:
        """Ends `serve` once the current job has ended or is handed back; a second call ends it at once."""
        self._stops += 1  # no Event: the interrupted thread may hold its lock

    def serve(self) -> None:
        """Works until it is stopped. While the service is out of reach it waits, and reports this once.

        It asks for work only when it has nothing left to report. If the service then still lists a job as this agent's,
        the agent has never received it.
        """
        left = kill_left_behind(self._settings.work_dir)
        if left:
            self._log(f"ended {left} processes that jobs of an earlier agent had left")
        port = Port(self._settings.rendezvous_port)
        try:
            told = registration(self._settings, instance=self._instance, port=port.number)
            request = LeaseRequest(agent=self._settings.name, instance=self._instance)
            registered = waiting = False
            while not self._stops:
                lease = None
                try:
                    if not registered:
                        self._client.register(told)
                        registered = True
                    if not self._spool.deliver(self._client.report, lambda _: None):
                        raise ServiceError("reports wait to be delivered")
                    self._retention.turn(lambda: self._stops > 0)
                    lease = self._client.lease(request)
                    waiting = False
                except NotFoundError:  # the service has another database than before
                    registered = False
                except (ServiceError, TooManyRequestsError) as error:
                    if not waiting:
                        self._log(f"waiting for the service: {error}")
                    waiting = True
                if lease is None:
                    until_s = time.monotonic() + self._settings.poll_s
                    while not self._stops and (left_s := until_s - time.monotonic()) > 0:
                        time.sleep(min(left_s, _LOOK_S))
                else:
                    self._work(lease)
        finally:
            port.close()
        self._spool.deliver(self._client.report, self._log)

    def _urgency(self) -> Urgency:
        if not self._stops:
            return "none"
        if self._stops > 1:
            return "now"
        if not self._says_draining:
            self._says_draining = True
            threading.Thread(target=self._tell_draining, name="drain", daemon=True).start()
        return "drain"

    def _tell_draining(self) -> None:
        """Reports that this agent drains, from a separate thread: the current job does not wait for it."""
        self._log(f"draining: the job at hand has {self._settings.drain_s:g} s to end")
        try:
            self._client.present(self._settings.name, Presence(instance=self._instance, draining=True))
        except PipeplanError as error:
            self._log(f"the service did not learn that this agent is draining: {error}")

    def _work(self, lease: Lease) -> None:
        """Does one job and reports its end. The agent continues after any failure of the job.

        A service out of reach is not a failure of the job: the report waits in the spool until the service is back.
        """
        task, gang = lease.job.task, lease.gang
        what = f"job {lease.job.id}: {task.kind} {getattr(task, 'model', '')}".rstrip()
        self._log(what if gang is None else f"{what}, node {gang.node_rank} of {gang.nodes} ({', '.join(gang.agents)})")
        work = LeasedWork(settings=self._settings, client=self._client, urgency=self._urgency)
        try:
            result = work.perform(lease)
            report_id = new_report_id()
            self._report(lease, completion(lease, result, report_id), report_id, "done")
        except (LeaseLostError, CancelledError, ServiceError) as error:
            self._log(f"job {lease.job.id}: {error}")
        except HandedBackError as reason:
            self._log(f"job {lease.job.id}: handed back: {reason}")
            try:
                self._client.release(lease)
            except PipeplanError as error:
                self._log(f"job {lease.job.id}: goes back when its lease expires: {error}")
        except StoppedError as error:
            self._fail(lease, str(error), retry=True)
        except PipeplanError as error:
            self._fail(lease, str(error))
        except Exception as error:  # the outer loop: a full disk, for example, ends the job and not the agent
            self._fail(lease, f"the agent failed: {type(error).__name__}: {error}")

    def _fail(self, lease: Lease, sentence: str, *, retry: bool = False) -> None:
        report_id = new_report_id()
        error = (sentence[:MAX_ERROR_CHARACTERS] or "the agent gave no reason").replace("\0", "")
        self._report(lease, failure(lease, error, report_id, retry=retry), report_id, sentence)

    def _report(self, lease: Lease, report: SpooledReport, report_id: str, said: str) -> None:
        """Puts a report into the spool, or sends it directly to the service if no file can be written."""
        self._log(f"job {lease.job.id}: {said}")
        try:
            self._spool.add(report, report_id)
        except OSError as full:
            self._log(f"job {lease.job.id}: its report is not kept on the disk ({full.strerror})")
            try:
                self._client.report(report.path, report.body)
            except PipeplanError as error:
                self._log(f"job {lease.job.id}: could not be reported: {error}")
        else:
            self._spool.deliver(self._client.report, self._log)
