"""Agent: takes jobs from the service, does each in a process of its own, and reports under the lease."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from planner_service.contract.documents import dump, parse, plan_document, read_text
from planner_service.contract.jobs import Lease, LeaseRequest, ProfileResult, Progress, RunResult, RunTask
from planner_service.core.errors import InvalidInputError, LeaseLostError, PipeplanError, ServiceError
from worker_agent.allow import require_allowed
from worker_agent.client import AgentClient
from worker_agent.settings import AgentSettings
from worker_agent.task import write_task

Log = Callable[[str], None]
_STOP_S = 15.0


@dataclass(slots=True)
class _Child:
    """A job's process: its newest progress, and what it printed last on standard error."""

    process: subprocess.Popen[str]
    progress: Progress | None = None
    errors: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def read(self) -> None:
        """Starts following both outputs."""
        self.readers = [threading.Thread(target=target, daemon=True) for target in (self._progress, self._errors)]
        for reader in self.readers:
            reader.start()

    def stop(self) -> None:
        """Ends the process, which ends its own children."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def reason(self) -> str:
        """Why it failed, in one sentence."""
        for reader in self.readers:
            reader.join(1.0)
        if self.process.returncode < 0:
            return f"the job's process was killed by {signal.Signals(-self.process.returncode).name}"
        return self.errors[-1].removeprefix("error: ") if self.errors else "the job's process said nothing"

    def _progress(self) -> None:
        for line in self.process.stdout or ():
            self.progress = parse(Progress, line)

    def _errors(self) -> None:
        for line in self.process.stderr or ():
            if line.strip():
                self.errors = [*self.errors[-20:], line.strip()]


class Agent:
    """One node's agent. `stop` may be called from a signal handler: the job at hand is ended and left to the next."""

    def __init__(self, settings: AgentSettings, client: AgentClient, log: Log) -> None:
        self._settings = settings
        self._client = client
        self._log = log
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ends `serve` soon."""
        self._stopping.set()

    def serve(self) -> None:
        """Works until it is stopped. While the service is out of reach it waits, and says so once."""
        reachable = True
        while not self._stopping.is_set():
            try:
                lease = self._client.lease(LeaseRequest(agent=self._settings.name))
                reachable = True
            except ServiceError as error:
                if reachable:
                    self._log(f"waiting for the service: {error}")
                reachable, lease = False, None
            if lease is None:
                self._stopping.wait(self._settings.poll_s)
            else:
                self._work(lease)

    def _work(self, lease: Lease) -> None:
        """Does one job and reports its end; whatever happens to it is not the agent's end."""
        self._log(f"job {lease.job.id}: {lease.job.task.kind} {lease.job.task.model}")
        try:
            result = self._perform(lease)
            if result is not None:
                self._client.complete(lease, result)
                self._log(f"job {lease.job.id}: done")
        except LeaseLostError as error:
            self._log(f"job {lease.job.id}: {error}")
        except PipeplanError as error:
            self._log(f"job {lease.job.id}: {error}")
            self._report_failure(lease, error)

    def _report_failure(self, lease: Lease, error: PipeplanError) -> None:
        try:
            self._client.fail(lease, str(error))
        except PipeplanError as unreported:
            self._log(f"job {lease.job.id}: could not be reported: {unreported}")

    def _perform(self, lease: Lease) -> ProfileResult | RunResult | None:
        """The job's result; None if it was cancelled, or this agent is stopping. Raises why it failed."""
        task = lease.job.task
        require_allowed(task, self._settings.allow)
        plan = dump(plan_document(self._client.plan(task.plan_id))) if isinstance(task, RunTask) else None
        folder = self._settings.work_dir / lease.job.id
        write_task(folder, task, plan)
        child = _start(folder)
        try:
            finished = self._follow(lease, child)
        finally:
            if child.process.poll() is None:
                child.stop()
        if not finished:
            return None
        if child.process.returncode != 0:
            raise PipeplanError(child.reason())
        text = read_text(folder / "result.json")
        return parse(RunResult, text) if isinstance(task, RunTask) else parse(ProfileResult, text)

    def _follow(self, lease: Lease, child: _Child) -> bool:
        """Keeps the lease until the process ends (True), the job is cancelled or the agent stops (False)."""
        interval_s = max(lease.expires_in_s / 3, 0.1)
        told: Progress | None = None
        waited_s = 0.0
        while child.process.poll() is None:
            if self._stopping.wait(0.1):
                return False
            waited_s += 0.1
            if waited_s < interval_s and (child.progress == told or waited_s < 0.3):
                continue
            told, waited_s = child.progress, 0.0
            if self._is_cancelled(lease, told):
                self._log(f"job {lease.job.id}: cancelled")
                return False
        return True

    def _is_cancelled(self, lease: Lease, progress: Progress | None) -> bool:
        """Sends a heartbeat. A service out of reach does not stop the work: the end is reported when it is back."""
        try:
            return self._client.heartbeat(lease, progress).cancelled
        except ServiceError:
            return False


def _start(folder: Path) -> _Child:
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker_agent.task", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise InvalidInputError("work_dir", f"must let a process start ({error.strerror})", str(folder)) from error
    child = _Child(process)
    child.read()
    return child
