"""The process of one part: `python -m benchmarks.gpu_check.part MODULE:FUNCTION FILE SECONDS LAUNCHER [short]`."""

import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_check.findings import Findings
from worker_agent.engine.processes import exit_with_parent


def main() -> None:
    """Runs the part, and records how it ends."""
    target, path, seconds, launcher, *options = sys.argv[1:]
    exit_with_parent(int(launcher))
    findings = Findings(Path(path), seconds=float(seconds), short="short" in options)
    module, _, function = target.partition(":")
    try:
        getattr(import_module(module), function)(findings)
    except Exception as error:  # whatever ends the part is a finding
        findings.fail("the part itself", error)
    findings.end()


if __name__ == "__main__":
    main()
