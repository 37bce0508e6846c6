"""`pipeplan-agent` for tests: as its users start it, or as a fork, which does without the imports of a start."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeplan.cli.console import run_app
from tests.forked import fork_server
from worker_agent.cli import app

AGENT = (sys.executable, "-c", "from worker_agent.cli import main; main()")
"""The command line, without the arguments."""


def finish(
    arguments: Sequence[str],
    *,
    directory: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """How the command ends, as a fork. The processes that it starts are as they are everywhere."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        outputs = DupFd(out.fileno()), DupFd(err.fileno())
        given = (arguments, directory or Path.cwd(), {**os.environ, **variables}, *outputs)
        process = fork_server().Process(target=_run, args=given)
        process.start()
        process.join()
        assert process.exitcode is not None
        for output in (out, err):
            output.seek(0)
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read(), err.read())


def _run(arguments: Sequence[str], directory: Path, environment: Mapping[str, str], out: Any, err: Any) -> None:
    os.dup2(out.detach(), 1)
    os.dup2(err.detach(), 2)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another one than the fork server's
    os.chdir(directory)
    run_app(app, arguments)
