"""Agent: takes jobs from the service, does each in a process of its own, and reports under the lease."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from planner_service.contract.documents import dump, parse, plan_document, read_text
from planner_service.contract.jobs import Lease, LeaseRequest, ProfileResult, Progress, RunResult, RunTask
from planner_service.core.errors import InvalidInputError, LeaseLostError, PipeplanError, RunFailedError, ServiceError
from worker_agent.allow import require_allowed
from worker_agent.client import AgentClient
from worker_agent.settings import AgentSettings
from worker_agent.task import write_task

Log = Callable[[str], None]
_ERROR = "error: "
_STOP_S = 15.0
_LOOK_S = 0.1
_TELL_S = 0.3


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
        self.finish_reading()
        if self.process.returncode < 0:
            return f"the job's process was killed by {signal.Signals(-self.process.returncode).name}"
        # torch and Python itself may warn on standard error once our own last word is said
        said = [line for line in self.errors if line.startswith(_ERROR)] or self.errors
        return said[-1].removeprefix(_ERROR) if said else "the job's process said nothing"

    def finish_reading(self) -> None:
        """Reads what is left, once the process has ended; what it started may hold its outputs a little longer."""
        for reader in self.readers:
            reader.join(1.0)

    def _progress(self) -> None:
        for line in self.process.stdout or ():
            try:
                self.progress = parse(Progress, line)
            except InvalidInputError:  # a library prints: whoever stops reading would block the process
                continue

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
        self._stopping = False

    def stop(self) -> None:
        """Ends `serve` soon."""
        self._stopping = True  # no Event: its lock may be held by the very thread that a signal interrupts

    def serve(self) -> None:
        """Works until it is stopped. While the service is out of reach it waits, and says so once."""
        reachable = True
        while not self._stopping:
            try:
                lease = self._client.lease(LeaseRequest(agent=self._settings.name))
                reachable = True
            except ServiceError as error:
                if reachable:
                    self._log(f"waiting for the service: {error}")
                reachable, lease = False, None
            if lease is None:
                self._pause(self._settings.poll_s)
            else:
                self._work(lease)

    def _pause(self, duration_s: float) -> bool:
        """Waits, unless the agent stops; says whether it does."""
        deadline_s = time.monotonic() + duration_s
        while not self._stopping and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
        return self._stopping

    def _work(self, lease: Lease) -> None:
        """Does one job and reports its end; whatever happens to it is not the agent's end.

        A service out of reach is no failure of the job: its lease runs out, and the job goes back to the queue.
        """
        self._log(f"job {lease.job.id}: {lease.job.task.kind} {lease.job.task.model}")
        try:
            result = self._perform(lease)
            if result is not None:
                self._client.complete(lease, result)
                self._log(f"job {lease.job.id}: done")
        except (LeaseLostError, ServiceError) as error:
            self._log(f"job {lease.job.id}: {error}")
        except PipeplanError as error:
            self._report_failure(lease, str(error))
        except Exception as error:  # the outer loop: a full disk, say, ends the job and not the agent
            self._report_failure(lease, f"the agent failed: {type(error).__name__}: {error}")

    def _report_failure(self, lease: Lease, sentence: str) -> None:
        self._log(f"job {lease.job.id}: {sentence}")
        try:
            self._client.fail(lease, sentence)
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
        if not finished or (self._stopping and child.process.returncode != 0):
            return None  # whoever stops a node's service stops the job's process with it: that is no failure
        if child.process.returncode != 0:
            raise RunFailedError(child.reason())
        text = read_text(folder / "result.json")
        return parse(RunResult, text) if isinstance(task, RunTask) else parse(ProfileResult, text)

    def _follow(self, lease: Lease, child: _Child) -> bool:
        """Keeps the lease until the process ends (True), the job is cancelled or the agent stops (False)."""
        interval_s = max(lease.expires_in_s / 3, _LOOK_S)
        told: Progress | None = None
        beaten_s = time.monotonic()
        while child.process.poll() is None:
            if self._pause(_LOOK_S):
                return False
            due_s = interval_s if child.progress == told else min(interval_s, _TELL_S)
            if time.monotonic() - beaten_s < due_s:
                continue
            told, beaten_s = child.progress, time.monotonic()
            if self._is_cancelled(lease, told):
                return False
        child.finish_reading()
        return child.progress == told or not self._is_cancelled(lease, child.progress)

    def _is_cancelled(self, lease: Lease, progress: Progress | None) -> bool:
        """Sends a heartbeat. A service out of reach does not stop the work: the end is reported when it is back."""
        try:
            cancelled = self._client.heartbeat(lease, progress).cancelled
        except ServiceError:
            return False
        if cancelled:
            self._log(f"job {lease.job.id}: cancelled")
        return cancelled


def _start(folder: Path) -> _Child:
    """The job's process, in a session of its own: an interrupt from the terminal is for the agent to deal with."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker_agent.task", str(folder), str(os.getpid())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise InvalidInputError("work_dir", f"must let a process start ({error.strerror})", str(folder)) from error
    child = _Child(process)
    child.read()
    return child
