"""Processes: all of a job's, found by a mark in their environment, wherever they have gone.

A process that a job starts inherits the mark, even in a session of its own and after its parent has died.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "PIPEPLAN_JOB"
_PROC = Path("/proc")
_LOOK_S = 0.02
_LONGEST_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Whose a process is: the agent's folder, the agent's process, the job and which lease of it."""

    work_dir: Path
    agent: int
    job: str
    fence: int

    def environment(self) -> dict[str, str]:
        """The variable that carries it."""
        return {VARIABLE: f"{self.agent}:{self.job}:{self.fence}:{self.work_dir}"}


def kill_marked(mark: Mark) -> None:
    """Ends every process of a job at once; returns when none is left, or after ten seconds."""
    content = b"=".join(part.encode() for part in next(iter(mark.environment().items())))
    deadline_s = time.monotonic() + _LONGEST_S
    while (left := _marked(lambda value: value == content)) and time.monotonic() < deadline_s:
        for process in left:
            _kill(process)
        time.sleep(_LOOK_S)


def kill_left_behind(work_dir: Path) -> int:
    """Ends what jobs of earlier agents on this folder have left, whose agents are gone; returns how many there were."""
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


def _marked(wanted: Callable[[bytes], bool]) -> list[int]:
    found = []
    for path in _PROC.glob("[0-9]*/environ"):
        process = int(path.parent.name)
        if process != os.getpid() and any(wanted(value) for value in _variables(path)):
            found.append(process)
    return found


def _variables(path: Path) -> list[bytes]:
    try:
        return [value for value in path.read_bytes().split(b"\0") if value.startswith(VARIABLE.encode())]
    except OSError:  # it has ended, or is another user's
        return []


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
