"""Hung: finds ranks that neither end nor go on, and ends them, so that a run that hangs fails and says why.

A rank gives a sign of life twice a second, whatever it waits for. One that gives none any more is stopped, or holds
the interpreter. One that does, but stays at an instruction that waits for nobody, is lost in the model. Whoever waits
for another rank is not to blame, however long it waits.

Only time counts in which the hunter itself was looking: a machine that was suspended, or a container that was paused,
goes on with all its ranks.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from planner_service.core.plan import Plan
from planner_service.core.schedule.instructions import Checkpoint, Instruction, Update, is_compute
from planner_service.core.schedule.program import Program
from worker_agent.polling import polling
from worker_agent.runtime.job import RunJob, read_job
from worker_agent.runtime.results import RankFailure, write
from worker_agent.runtime.status import STARTING, Status, read_status

SILENT_S = 10.0
"""Without a sign of life for so long, a rank is taken for hung."""

STARTING_S = 60.0
"""So long a rank may be silent before its first instruction, unless it is stopped: imports, on a busy disk."""

PREDICTED_TIMES = 100.0
"""An instruction that takes so many times what the plan predicts for one, and longer than `SILENT_S`, hangs."""

_INTERVAL_S, _LONGEST_LOOK_S = 0.25, 1.0


@dataclass(slots=True)
class Seen:
    """What was last seen of a rank, and since when on the hunter's clock."""

    pulse_s: float
    pulse_since_s: float
    place: tuple[int, float]
    place_since_s: float
    stopped_since_s: float | None = None


class Hunter:
    """Looks at the ranks of this node, one look at a time."""

    def __init__(self, job: RunJob, here: Sequence[int], now_s: float) -> None:
        self._job = job
        self._here = tuple(here)
        self._limits_s = limits_s(job.plan, job.timeout_s)
        self._begun_s = now_s
        self._last_s = now_s
        self._clock_s = 0.0
        self._seen: dict[int, Seen] = {}
        self._ended: set[int] = set()

    @cached_property
    def _begun(self) -> tuple[RunJob, Program]:
        """The job as its ranks read it: among several nodes only the first knows before where it begins."""
        begun = replace(read_job(self._job.directory.job), out=self._job.out)
        return begun, begun.program()

    def look(self, now_s: float) -> None:
        """Ends whoever is hung, by a signal that nobody can ignore; before, its last word is written for it."""
        self._clock_s += min(now_s - self._last_s, _LONGEST_LOOK_S)
        self._last_s = now_s
        for rank in self._here:
            if rank in self._ended or self._job.directory.result(rank).exists():
                continue
            status = read_status(self._job.directory.status(rank))
            if status is not None and status.pulse_s < self._begun_s:
                status = None  # of an earlier attempt
            process = status.process if status else _starting(rank)
            if process is not None and _is_alive(process):
                reason = self._reason(rank, status, process)
                if reason is not None:
                    self._end(rank, process, reason)

    def _reason(self, rank: int, status: Status | None, process: int) -> str | None:
        """Why a rank is hung; None if it is not."""
        seen = self._notice(rank, status)
        silent_s = self._clock_s - seen.pulse_since_s
        instruction = status.instruction if status else STARTING
        if instruction >= 0 and silent_s > SILENT_S:
            return f"hung: no sign of life for {silent_s:.0f} s"
        if instruction < 0:
            return self._silence(seen, silent_s, process) or self._delay(seen)
        begun, program = self._begun
        stream = program.streams[rank]
        limit_s = self._limit_s(begun, program, stream.stage, stream.instructions[instruction], status)
        busy_s = self._clock_s - seen.place_since_s
        return None if limit_s is None or busy_s <= limit_s else f"hung: {busy_s:.0f} s in one instruction"

    def _notice(self, rank: int, status: Status | None) -> Seen:
        now_s = self._clock_s
        pulse_s = status.pulse_s if status else 0.0
        place = (status.instruction, status.started_s) if status else (STARTING, 0.0)
        seen = self._seen.setdefault(rank, Seen(pulse_s, now_s, place, now_s))
        if seen.pulse_s != pulse_s:
            seen.pulse_s, seen.pulse_since_s = pulse_s, now_s
        if seen.place != place:
            seen.place, seen.place_since_s = place, now_s
        return seen

    def _silence(self, seen: Seen, silent_s: float, process: int) -> str | None:
        """Of a rank that is at no instruction: the import of a large library gives no sign of life either."""
        if not _is_stopped(process):
            seen.stopped_since_s = None
            return f"hung: no sign of life for {silent_s:.0f} s" if silent_s > STARTING_S else None
        if seen.stopped_since_s is None:
            seen.stopped_since_s = self._clock_s
        stopped_s = self._clock_s - max(seen.stopped_since_s, seen.pulse_since_s)
        return f"hung: no sign of life for {silent_s:.0f} s" if stopped_s > SILENT_S else None

    def _delay(self, seen: Seen) -> str | None:
        """Of a rank that gives signs of life before its first instruction: the others wait for it, but not longer."""
        busy_s = self._clock_s - seen.place_since_s
        late = seen.place[0] == STARTING and busy_s > self._job.timeout_s
        return f"hung: {busy_s:.0f} s before its first instruction" if late else None

    def _limit_s(
        self, begun: RunJob, program: Program, first_stage: int, instruction: Instruction, status: Status | None
    ) -> float | None:
        """How long a rank may be at an instruction; None where it waits for others.

        The first batch may take any time that the others wait: a model may be compiled in it. So may a slow disk.
        """
        if not is_compute(instruction) and not isinstance(instruction, Update | Checkpoint):
            return None
        first = status is None or status.batches_done <= begun.first_step
        if first or isinstance(instruction, Checkpoint):
            return self._job.timeout_s
        return self._limits_s[program.pipeline.stage_of(first_stage, instruction.chunk)]

    def _end(self, rank: int, process: int, reason: str) -> None:
        self._ended.add(rank)
        write(self._job.directory.failure(rank), RankFailure(kind="hung", message=reason))
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def limits_s(plan: Plan, timeout_s: float) -> list[float]:
    """By stage, how long one instruction may take."""
    predicted_s = [costs.forward_s + costs.backward_s + costs.recompute_s for costs in plan.costs]
    return [min(max(SILENT_S, PREDICTED_TIMES * seconds), timeout_s) for seconds in predicted_s]


@contextmanager
def hunting(job: RunJob, here: Sequence[int]) -> Iterator[None]:
    """While it is active, ranks that hang are ended."""
    hunter = Hunter(job, here, time.monotonic())
    with polling(lambda: hunter.look(time.monotonic()), _INTERVAL_S, name="hunter"):
        yield


def _starting(rank: int) -> int | None:
    """The process of a rank that has not said which it is: the child of this one with its number."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(OSError):
                if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
                    return int(child)
    return None


def _is_alive(process: int) -> bool:
    """Whether it is there: one that has ended is torchrun's matter."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _is_stopped(process: int) -> bool:
    """Whether a signal, or a debugger, has stopped a process."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
