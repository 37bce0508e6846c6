"""Session: all parts of the check one after another, within one time, and the file of their findings."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.findings import Found, read_found

WITHIN_S = 530.0
"""Including the time to start and kill processes, below nine minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A function `target` (module:function) of Findings, and its share of the time."""

    name: str
    target: str
    weight: float


PARTS = (
    Part(name="environment", target="benchmarks.gpu_check.environment:check", weight=4),
    Part(name="schedules", target="benchmarks.gpu_check.schedules:check", weight=36),
    Part(name="nccl", target="benchmarks.gpu_check.nccl:check", weight=8),
    Part(name="gpt2", target="benchmarks.gpu_check.prediction:check_gpt2", weight=13),
    Part(name="llama", target="benchmarks.gpu_check.prediction:check_llama", weight=15),
    Part(name="constants", target="benchmarks.gpu_check.constants:check", weight=8),
    Part(name="executor", target="benchmarks.gpu_check.overhead:check", weight=8),
    Part(name="copies", target="benchmarks.gpu_check.copies:check", weight=3),
    Part(name="compile", target="benchmarks.gpu_check.compiling:check", weight=8),
)
"""The most important first: the rest of a part's share goes to the others."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a part ended: passed, failed, cut off, or not run (yet), and its findings."""

    name: str
    status: str = "not run"
    why: str = "the check has not come to it"
    share_s: float = 0.0
    seconds: float = 0.0
    found: Found = field(default_factory=Found)

    def document(self) -> dict[str, Any]:
        """As it stands in the file."""
        found = asdict(self.found)
        to_come = [{"what": name, "why": self.why} for name in found.pop("to_come")]
        del found["done"]
        head = {"name": self.name, "status": self.status, "why": self.why, "share_s": round(self.share_s, 1)}
        return head | {"took_s": round(self.seconds, 1)} | found | {"left_out": found["left_out"] + to_come}


def run(parts: Sequence[Part], *, seconds: float, out: Path, short: bool) -> dict[str, Any]:
    """Runs the parts; returns what the file holds in the end, and holds, so far as it goes, after every part."""
    outcomes = [Outcome(name=part.name) for part in parts]
    end_s = time.monotonic() + seconds
    document = _write(out, outcomes, seconds)
    for index, (part, outcome) in enumerate(zip(parts, outcomes, strict=True)):
        left_s = end_s - time.monotonic()
        outcome.share_s = left_s * part.weight / sum(later.weight for later in parts[index:])
        if outcome.share_s <= 0:
            outcome.why = "the time was spent"
            continue
        print(f"{part.name}: up to {outcome.share_s:.0f} s", flush=True)
        _run_part(part, outcome, short=short)
        why = f", {outcome.why}" if outcome.why else ""
        print(f"{part.name}: {outcome.status} after {outcome.seconds:.1f} s{why}", flush=True)
        document = _write(out, outcomes, seconds)
    return document


def _run_part(part: Part, outcome: Outcome, *, short: bool) -> None:
    """Runs a part in a separate process, and ends whatever is left of it."""
    with tempfile.TemporaryDirectory(prefix="pipeplan-gpu-check-") as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, "-m", "benchmarks.gpu_check.part", part.target, str(path), f"{outcome.share_s:.1f}"]
        start_s = time.monotonic()
        process = subprocess.Popen(
            [*command, str(os.getpid()), *(["short"] if short else [])],
            env={"OMP_NUM_THREADS": "1"} | os.environ,  # the device does the work; more threads would hinder each other
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(outcome.share_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        outcome.seconds = time.monotonic() - start_s
        outcome.found = read_found(path)
    outcome.status, outcome.why = _ending(outcome.found, code)


def _ending(found: Found, code: int | None) -> tuple[str, str]:
    """Status and reason."""
    if code is None:
        return "cut off", "its share of the time ran out"
    if not found.done:
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return "failed", f"its process {ending} before its end"
    if found.failures:
        return "failed", f"{len(found.failures)} failed: {', '.join(each['case'] for each in found.failures)}"
    return "passed", ""


def _write(out: Path, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Writes everything so far, atomically."""
    environment = next((o.found.figures for o in outcomes if o.name == "environment"), {})
    ran = [outcome for outcome in outcomes if outcome.status != "not run"]
    document = {
        "versions": environment.get("versions", {"python": platform.python_version()}),
        "device": environment.get("device", {}),
        "seconds": seconds,
        "passed": all(outcome.status == "passed" for outcome in ran),
        "parts": [outcome.document() for outcome in outcomes],
    }
    aside = out.with_name(out.name + ".part")
    aside.write_text(json.dumps(document, indent=1), encoding="utf-8")
    aside.replace(out)
    return document
