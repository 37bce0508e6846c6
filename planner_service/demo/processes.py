"""The demo's service and agent: processes of their own, ended with it whatever happens."""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeplan.errors import PipeplanError

_READY = "pipeplan serves "
_START_S = 60.0
_STOP_S = 15.0


class Child:
    """A process, and the lines that it printed on standard error. Settings of other services are not its."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("PIPEPLAN_")},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last = ""
        threading.Thread(target=self._read, name=name, daemon=True).start()

    def next_line(self, timeout_s: float) -> str:
        """The next line. Raises PipeplanError if the process ends instead, or says nothing for so long."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PipeplanError(f"the {self.name} did not start within {timeout_s:.0f} s; log: {self.log}") from None
        if line is None:
            raise self._ended()
        return line

    def require_running(self) -> None:
        """Raises PipeplanError if the process has ended, with what it said last."""
        if self._process.poll() is not None:
            raise self._ended()

    def stop(self) -> None:
        """Asks the process to end, and sees to it."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> PipeplanError:
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        said = f": {self._last.removeprefix('error: ')}" if self._last else ""
        return PipeplanError(f"the {self.name} {how}{said}")

    def _read(self) -> None:
        with self.log.open("w", encoding="utf-8") as log:
            for line in self._process.stderr or ():
                log.write(line)
                log.flush()
                self._last = line.strip() or self._last
                self._lines.put(line.strip())
        self._lines.put(None)


@contextmanager
def service(folder: Path, port: int) -> Iterator[tuple[Child, str]]:
    """A service with a database of its own in the folder, and its URL."""
    database = f"sqlite:///{folder / 'pipeplan.sqlite3'}"
    options = ["--port", str(port), "--database", database, "--exit-with-parent"]
    options += ["--log-format", "human", "--log-level", "warning"]
    child = Child("service", ["planner_service", "serve", *options], folder / "service.log")
    try:
        line = child.next_line(_START_S)
        while not line.startswith(_READY):
            line = child.next_line(_START_S)
        yield child, line.removeprefix(_READY)
    finally:
        child.stop()


@contextmanager
def agent(folder: Path, url: str) -> Iterator[Child]:
    """An agent of that service on this machine."""
    options = ["--url", url, "--name", "demo", "--work-dir", str(folder / "agent"), "--drain-s", "0"]
    options.append("--exit-with-parent")
    child = Child("agent", ["worker_agent", "start", *options], folder / "agent.log")
    try:
        child.next_line(_START_S)
        yield child
    finally:
        child.stop()
