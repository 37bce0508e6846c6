"""Hung: finds ranks that neither end nor go on, and ends them, so that a run that hangs fails and says why.

A rank gives a sign of life twice a second, whatever it waits for. One that gives none any more is stopped, or holds
the interpreter. One that does, but stays at an instruction that waits for nobody, is lost in the model. Whoever waits
for another rank is not to blame, however long it waits.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from planner_service.core.plan import Plan
from planner_service.core.schedule.instructions import is_compute
from planner_service.core.schedule.program import Program
from worker_agent.runtime.job import RunJob, read_job
from worker_agent.runtime.results import RankFailure, write
from worker_agent.runtime.status import Status, read_status

SILENT_S = 10.0
"""Without a sign of life for so long, a rank is taken for hung."""

STARTING_S = 60.0
"""How long a rank may take to its first sign of life once another has given one: imports, on a busy disk."""

PREDICTED_TIMES = 100.0
"""An instruction that takes so many times what the plan predicts for one, and longer than `SILENT_S`, hangs."""

_INTERVAL_S = 0.25


class Hunter:
    """Looks at the ranks of this node, one look at a time."""

    def __init__(self, job: RunJob, here: Sequence[int], now_s: float) -> None:
        self._job = job
        self._here = tuple(here)
        self._limits_s = limits_s(job.plan, job.timeout_s)
        self._begun_s = now_s
        self._first_sign_s: float | None = None
        self._ended: set[int] = set()

    @cached_property
    def _begun(self) -> tuple[RunJob, Program]:
        """The job as its ranks read it: among several nodes only the first knows before where it begins."""
        begun = replace(read_job(self._job.directory.job), out=self._job.out)
        return begun, begun.program()

    def look(self, now_s: float) -> None:
        """Ends whoever is hung, by a signal that nobody can ignore; before, its last word is written for it."""
        for rank in self._here:
            status = read_status(self._job.directory.status(rank))
            if status is not None and status.pulse_s < self._begun_s:
                status = None  # of an earlier attempt
            if status is not None and self._first_sign_s is None:
                self._first_sign_s = now_s
            reason = self._silence(now_s) if status is None else self._reason(rank, status, now_s)
            if reason is not None and rank not in self._ended:
                self._end(rank, status.process if status else _starting(rank), reason)

    def _silence(self, now_s: float) -> str | None:
        if self._first_sign_s is None or now_s - self._first_sign_s <= STARTING_S:
            return None
        return f"hung: no sign of life in {STARTING_S:.0f} s"

    def _reason(self, rank: int, status: Status, now_s: float) -> str | None:
        """Why a rank is hung; None if it is not. The first batch may take any time: a model may be compiled in it."""
        if now_s - status.pulse_s > SILENT_S:
            return f"hung: no sign of life for {now_s - status.pulse_s:.0f} s"
        if status.instruction < 0:
            return None
        job, program = self._begun
        stream, busy_s = program.streams[rank], now_s - status.started_s
        instruction = stream.instructions[status.instruction]
        stage = program.pipeline.stage_of(stream.stage, instruction.chunk)
        first = status.batches_done <= job.first_step
        limit_s = self._job.timeout_s if first else self._limits_s[stage]
        if not is_compute(instruction) or busy_s <= limit_s:
            return None
        return f"hung: {busy_s:.0f} s in one instruction"

    def _end(self, rank: int, process: int | None, reason: str) -> None:
        self._ended.add(rank)
        write(self._job.directory.failure(rank), RankFailure(kind="hung", message=reason))
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def limits_s(plan: Plan, timeout_s: float) -> list[float]:
    """By stage, how long one instruction may take."""
    predicted_s = [costs.forward_s + costs.backward_s + costs.recompute_s for costs in plan.costs]
    return [min(max(SILENT_S, PREDICTED_TIMES * seconds), timeout_s) for seconds in predicted_s]


@contextmanager
def hunting(job: RunJob, here: Sequence[int]) -> Iterator[None]:
    """While it is active, ranks that hang are ended."""
    hunter, stop = Hunter(job, here, time.monotonic()), threading.Event()

    def follow() -> None:
        while not stop.wait(_INTERVAL_S):
            hunter.look(time.monotonic())

    thread = threading.Thread(target=follow, name="hunter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _starting(rank: int) -> int | None:
    """The process of a rank that has not said which it is: the child of this one with its number."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(OSError):
                if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
                    return int(child)
    return None
