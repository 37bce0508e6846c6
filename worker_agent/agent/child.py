"""Child: a job's process and everything that it starts, followed by the agent and ended by it.

All of a job's processes carry a mark in their environment. A process that a job starts inherits the mark, even in a
session of its own and after its parent has died: the mark finds it wherever it has gone.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pipeplan.documents.files import parse
from pipeplan.errors import InvalidInputError
from pipeplan.protocol.jobs import Progress

VARIABLE = "PIPEPLAN_JOB"
"""The environment variable that carries the mark."""

LOST_PEER = 75
"""The exit status of a job that ended because of another node, or a signal: another attempt may succeed."""

CHECKPOINT_S = 30.0
"""How long a job may take to end after a request to stop; a run writes a checkpoint."""

_PROC = Path("/proc")
_LOOK_S = 0.02
_LONGEST_S = 10.0
_STOP_S = 5.0
_ERROR = "error: "
_LINE_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The owner of a process: the agent's folder, the agent's process, the job, and the job's lease by its fence."""

    work_dir: Path
    agent: int
    job: str
    fence: int

    def environment(self) -> dict[str, str]:
        return {VARIABLE: f"{self.agent}:{self.job}:{self.fence}:{self.work_dir}"}


def kill_marked(mark: Mark) -> None:
    """Kills every process of a job; returns when none is left, or after ten seconds."""
    content = b"=".join(part.encode() for part in next(iter(mark.environment().items())))
    deadline_s = time.monotonic() + _LONGEST_S
    while (left := _marked(lambda value: value == content)) and time.monotonic() < deadline_s:
        for process in left:
            _kill(process)
        time.sleep(_LOOK_S)


def kill_left_behind(work_dir: Path) -> int:
    """Ends the processes that jobs of earlier agents on this folder have left; returns how many there were."""
    end = f":{work_dir}".encode()
    prefix = f"{VARIABLE}=".encode()

    def orphaned(value: bytes) -> bool:
        agent, _, rest = value.removeprefix(prefix).partition(b":")
        gone = not (_PROC / agent.decode(errors="replace") / "cmdline").exists()
        return value.startswith(prefix) and rest.endswith(end) and gone

    found = _marked(orphaned)
    for process in found:
        _kill(process)
    return len(found)


def lives(work_dir: Path, job_id: str) -> bool:
    """Whether a process of a job, started by an agent on this folder, lives on this node."""
    begin, job, end = f"{VARIABLE}=".encode(), f":{job_id}:".encode(), f":{work_dir}".encode()
    return bool(_marked(lambda value: value.startswith(begin) and job in value and value.endswith(end)))


@dataclass(slots=True)
class JobProcess:
    """A job's process, with its newest progress, its last lines on standard error, and how much it printed in all."""

    process: subprocess.Popen[str]
    mark: Mark
    progress: Progress | None = None
    printed: int = 0
    errors: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def read(self) -> None:
        """Starts to follow both outputs."""
        self.readers = [threading.Thread(target=target, daemon=True) for target in (self._progress, self._errors)]
        for reader in self.readers:
            reader.start()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def ask_to_end(self) -> None:
        """Has the process end when it can: a run after its batch, with a checkpoint."""
        if not self.ended:
            self.process.send_signal(signal.SIGUSR1)  # and not SIGTERM, which all processes may have got already

    def stop(self) -> None:
        """Ends the process, which ends the ones it started, and then all remaining processes of the job."""
        if not self.ended:
            self.process.send_signal(signal.SIGHUP)  # SIGTERM lets a run end its batch
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.kill()

    def kill(self) -> None:
        """Kills all of the job's processes."""
        if not self.ended:
            self.process.kill()
        self.process.wait()
        kill_marked(self.mark)
        self.finish_reading()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None and not any(reader.is_alive() for reader in self.readers):
                stream.close()

    def reason(self) -> str:
        """Why it failed, in one sentence."""
        self.finish_reading()
        if self.process.returncode < 0:
            return f"the job's process was killed by {signal.Signals(-self.process.returncode).name}"
        # torch and Python itself may still warn on standard error after our own last line
        said = [line for line in self.errors if line.startswith(_ERROR)] or self.errors
        return said[-1].removeprefix(_ERROR) if said else "the job's process gave no reason"

    def finish_reading(self) -> None:
        """Reads the rest of the output after the process has ended; its children may hold the pipes a little longer."""
        for reader in self.readers:
            reader.join(1.0)

    def _progress(self) -> None:
        for line in self._lines(self.process.stdout):
            try:
                self.progress = parse(Progress, line)
            except InvalidInputError:  # a library's output: it must be read, or the process would block
                continue

    def _errors(self) -> None:
        for line in self._lines(self.process.stderr):
            if line.strip():
                self.errors = [*self.errors[-20:], line.strip()[:4000]]

    def _lines(self, stream: IO[str] | None) -> Iterator[str]:
        """The stream's lines; lines that are too long to be ours come in pieces."""
        while stream is not None and (line := stream.readline(_LINE_CHARACTERS)):
            self.printed += len(line)
            yield line


def start(folder: Path, mark: Mark, environment: Mapping[str, str]) -> JobProcess:
    """The job's process, in a session of its own: the agent handles an interrupt from the terminal."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker_agent.agent.task", str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**environment, **mark.environment()},
            start_new_session=True,
        )
    except OSError as error:
        raise InvalidInputError("work_dir", f"must let a process start ({error.strerror})", str(folder)) from error
    child = JobProcess(process, mark)
    child.read()
    return child


def _marked(wanted: Callable[[bytes], bool]) -> list[int]:
    """The processes with a wanted mark, except this one."""
    found = []
    for path in _PROC.glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        marks = (variable for variable in variables if variable.startswith(VARIABLE.encode()))
        process = int(path.parent.name)
        if process != os.getpid() and any(wanted(mark) for mark in marks):
            found.append(process)
    return found


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
