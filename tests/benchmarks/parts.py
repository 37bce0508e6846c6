"""Parts of the GPU check that end badly, each in another way."""

import os
import signal
import threading

from benchmarks.gpu_check.findings import Findings


def fails(findings: Findings) -> None:
    """A case fails between two that pass."""

    def fail() -> dict[str, float]:
        raise ValueError("injected on purpose")

    findings.run({"before": lambda: {"figure": 1.5}, "failing": fail, "after": lambda: {"figure": 2.5}})


def hangs(findings: Findings) -> None:
    """A case passes, the next one never ends."""

    def hang() -> dict[str, float]:
        threading.Event().wait()
        return {}

    findings.run({"before": lambda: {"figure": 1.5}, "hanging": hang, "after": dict})


def dies(findings: Findings) -> None:
    """The process is killed."""
    findings.run({"before": lambda: {"figure": 1.5}, "dying": _die, "after": dict})


def _die() -> dict[str, float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def is_broken(findings: Findings) -> None:
    """The part itself fails, outside its cases."""
    raise RuntimeError("broken on purpose")


def gives_no_number(findings: Findings) -> None:
    """A figure that JSON does not know."""
    findings.run({"figure": lambda: {"figure": float("nan")}})


def passes(findings: Findings) -> None:
    """Comes after the others, and has time left."""
    findings.run({"only": lambda: {"figure": 1.0}})
