"""Real servers: `pipeplan serve` as a process of its own, on a free port."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

from pipeplan.cli.app import build_app
from pipeplan.cli.console import run_app
from tests.forked import fork_server
from tests.pipeplan.cli import commands
from tests.waiting import PATIENCE_S

PIPEPLAN = (sys.executable, "-c", "from pipeplan.cli.app import main; main()")


def environment(**changes: str) -> dict[str, str]:
    """The environment without settings of ours, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIPEPLAN_")}
    return kept | changes


@contextmanager
def serving(database: Path | str, *options: str, **settings: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a service that answers, and its process; it is ended with the block. A path is that of a file."""
    url = f"sqlite:///{database}" if isinstance(database, Path) else database
    command = [*PIPEPLAN, "serve", "--port", "0", "--database", url, *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(**settings)
    )
    try:
        yield announced_url(process), process
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True, slots=True)
class Fork:
    """A service that is a fork. `said` is its standard error, after the line with its address."""

    process: BaseProcess
    said: IO[str]

    @property
    def pid(self) -> int:
        """Its process's id."""
        if self.process.pid is None:
            raise LookupError("it was not started")
        return self.process.pid

    def terminated(self, timeout_s: float = PATIENCE_S) -> tuple[int | None, str]:
        """Its exit status after a SIGTERM (None: it goes on), and what it still wrote on standard error."""
        self.process.terminate()
        self.process.join(timeout_s)
        status = self.process.exitcode
        return status, self.said.read() if status is not None else ""


@contextmanager
def served(database: Path | str, *options: str, **settings: str) -> Iterator[str]:
    """The URL of a service, as `serving` gives it, for tests that leave its process alone: a fork."""
    with forked(database, *options, **settings) as (url, _):
        yield url


@contextmanager
def forked(database: Path | str, *options: str, **settings: str) -> Iterator[tuple[str, Fork]]:
    """The URL of a service and its fork, which starts in a fraction of the time of a process of its own."""
    url = f"sqlite:///{database}" if isinstance(database, Path) else database
    arguments = ["serve", "--port", "0", "--database", url, *options]
    reading, writing = os.pipe()
    process = fork_server().Process(
        target=_serve, args=(arguments, environment(**settings), DupFd(writing)), name="service", daemon=True
    )
    with os.fdopen(reading) as said:
        process.start()
        os.close(writing)
        try:
            yield _announced(said), Fork(process, said)
        finally:
            process.kill()
            process.join()
            process.close()


def _serve(arguments: list[str], settings: dict[str, str], said: Any) -> None:
    os.dup2(said.detach(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(settings)
    run_app(build_app("serve"), arguments)


def announced_url(process: subprocess.Popen[str]) -> str:
    """Waits for the line that says where the service is."""
    if process.stderr is None:
        raise LookupError("standard error is not read")
    return _announced(process.stderr)


def _announced(said: IO[str]) -> str:
    line = said.readline()
    found = re.search(r"http://\S+", line)
    if found is None:
        raise LookupError(line + said.read())
    return found.group()


def pipeplan(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in this process: a start costs a second and a half. `serve` needs its own."""
    with patch.dict(os.environ, environment(**settings), clear=True):
        ended = commands.pipeplan(*arguments)
    return subprocess.CompletedProcess(arguments, ended.status, ended.out, ended.err)


def pipeplan_process(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, as users start it."""
    return subprocess.run([*PIPEPLAN, *arguments], capture_output=True, text=True, env=environment(**settings))
